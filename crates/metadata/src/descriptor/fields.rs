//! Taking members out of a JSON object, strictly and with the path in every error.

use serde_json::{Map, Value};

use super::{DocumentError, UnknownMembers};

/// An object whose members are taken one by one; what is left over is unknown.
pub(super) struct Fields {
    path: String,
    members: Map<String, Value>,
}

impl Fields {
    /// `path` is empty for the document itself.
    pub(super) fn new(value: Value, path: impl Into<String>) -> Result<Self, DocumentError> {
        let path = path.into();
        match value {
            Value::Object(members) => Ok(Self { path, members }),
            other => Err(wrong_type(
                if path.is_empty() {
                    "(document)".into()
                } else {
                    path
                },
                "an object",
                &other,
            )),
        }
    }

    pub(super) fn path_of(&self, member: &str) -> String {
        if self.path.is_empty() {
            member.to_owned()
        } else {
            format!("{}.{member}", self.path)
        }
    }

    pub(super) fn take(&mut self, member: &str) -> Option<Value> {
        self.members.remove(member)
    }

    /// A member that must be there.
    pub(super) fn require(&mut self, member: &str) -> Result<Value, DocumentError> {
        self.take(member).ok_or_else(|| DocumentError::Missing {
            field: self.path_of(member),
        })
    }

    pub(super) fn optional_string(
        &mut self,
        member: &str,
    ) -> Result<Option<String>, DocumentError> {
        let path = self.path_of(member);
        self.take(member)
            .map(|value| string(value, path))
            .transpose()
    }

    pub(super) fn string(&mut self, member: &str) -> Result<String, DocumentError> {
        let value = self.require(member)?;
        string(value, self.path_of(member))
    }

    /// A string that must be there and must not be empty.
    pub(super) fn non_empty_string(&mut self, member: &str) -> Result<String, DocumentError> {
        let text = self.string(member)?;
        if text.is_empty() {
            return Err(DocumentError::value(
                self.path_of(member),
                "must not be empty",
            ));
        }
        Ok(text)
    }

    /// An unsigned integer from 0 to `max`; `None` where the member is missing.
    pub(super) fn optional_unsigned(
        &mut self,
        member: &str,
        max: u64,
    ) -> Result<Option<u64>, DocumentError> {
        let path = self.path_of(member);
        self.take(member)
            .map(|value| unsigned(&value, max, || path))
            .transpose()
    }

    pub(super) fn unsigned(&mut self, member: &str, max: u64) -> Result<u64, DocumentError> {
        let value = self.require(member)?;
        unsigned(&value, max, || self.path_of(member))
    }

    /// An array; a missing member reads as an empty one.
    pub(super) fn array(&mut self, member: &str) -> Result<Vec<Value>, DocumentError> {
        match self.take(member) {
            None => Ok(Vec::new()),
            Some(value) => array(value, self.path_of(member)),
        }
    }

    pub(super) fn into_unknown(self) -> UnknownMembers {
        self.members.into_iter().collect()
    }
}

pub(super) fn wrong_type(field: String, expected: &'static str, found: &Value) -> DocumentError {
    DocumentError::Type {
        field,
        expected,
        found: match found {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Number(number) if number.is_f64() => "a fraction",
            Value::Number(number) if number.is_i64() && !number.is_u64() => "a negative number",
            Value::Number(_) => "an integer",
            Value::String(_) => "a string",
            Value::Array(_) => "an array",
            Value::Object(_) => "an object",
        },
    }
}

pub(super) fn string(value: Value, field: String) -> Result<String, DocumentError> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(wrong_type(field, "a string", &other)),
    }
}

pub(super) fn array(value: Value, field: String) -> Result<Vec<Value>, DocumentError> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(wrong_type(field, "an array", &other)),
    }
}

/// The path is made only on error: a big descriptor has hundreds of thousands of numbers.
pub(super) fn unsigned(
    value: &Value,
    max: u64,
    field: impl FnOnce() -> String,
) -> Result<u64, DocumentError> {
    match value.as_u64() {
        Some(number) if number <= max => Ok(number),
        Some(number) => Err(DocumentError::value(
            field(),
            format!("{number} is out of range 0..={max}"),
        )),
        None => Err(wrong_type(field(), "an unsigned integer", value)),
    }
}

/// All elements as strings.
pub(super) fn strings(items: Vec<Value>, path: &str) -> Result<Vec<String>, DocumentError> {
    items
        .into_iter()
        .enumerate()
        .map(|(index, item)| string(item, format!("{path}[{index}]")))
        .collect()
}
