//! Settings from the environment, read strictly.
//!
//! A setting called `X` is `RERAIL_X`, or else `MC_X`, the name under which users of C++ engines
//! know it. A value that does not parse or is out of range is an error that names variable, value
//! and range (report U10). Deliberately not here: which settings there are.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::TransportError;

/// Where settings come from.
pub struct Settings<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Settings<'a> {
    /// Settings that `lookup` finds by the variable's full name.
    pub fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup }
    }

    /// The text of a setting, with the variable that it came from.
    pub fn text(&self, name: &str) -> Option<(String, String)> {
        ["RERAIL_", "MC_"].into_iter().find_map(|prefix| {
            let variable = format!("{prefix}{name}");
            (self.lookup)(&variable).map(|value| (variable, value))
        })
    }

    /// The value of a variable, by its full name.
    pub fn variable(&self, variable: &str) -> Option<String> {
        (self.lookup)(variable)
    }

    /// A number within `range`; `None` when the setting is not there.
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for anything else, an empty text included.
    pub fn number<T>(
        &self,
        name: &str,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, TransportError>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some((variable, value)) = self.text(name) else {
            return Ok(None);
        };
        match value.parse::<T>() {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(TransportError::Setting {
                variable,
                value,
                expected: format!("a number in {}..={}", range.start(), range.end()),
            }),
        }
    }
}

/// The process's environment. A variable that is not Unicode counts as its lossy text, so that it
/// is reported instead of ignored.
pub fn environment(variable: &str) -> Option<String> {
    std::env::var_os(variable).map(|value| value.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u10_a_bad_value_is_an_error_with_variable_value_and_range() {
        let lookup = |variable: &str| match variable {
            "MC_SLICE_SIZE" => Some("4096".to_owned()),
            "RERAIL_MTU" => Some("2048".to_owned()),
            "MC_MTU" => Some("512".to_owned()),
            "MC_GID_INDEX" => Some(String::new()),
            "MC_RETRY" => Some("3600".to_owned()),
            "MC_TAIL" => Some("7s".to_owned()),
            _ => None,
        };
        let settings = Settings::new(&lookup);
        let number = |name| settings.number::<u32>(name, 1..=4096);
        assert_eq!(number("SLICE_SIZE").expect("valid"), Some(4096));
        assert_eq!(number("MTU").expect("valid"), Some(2048), "RERAIL_ wins");
        assert_eq!(number("ABSENT").expect("absent"), None);
        for (name, value) in [("GID_INDEX", ""), ("TAIL", "7s")] {
            let error = number(name).expect_err("strict").to_string();
            assert_eq!(
                error,
                format!("MC_{name}={value}: expected a number in 1..=4096")
            );
        }
        assert!(settings.number::<u32>("RETRY", 1..=3599).is_err());
    }
}
