//! Licence expressions, as SPDX defines them and as older manifests write them.

/// Whether one may use a package under `expression` with only the licences in `allowed`.
///
/// `AND` binds more than `OR`; the old form `A/B` means `A OR B`; `A WITH B` is a licence of its
/// own. `None` if it is no licence expression.
pub(super) fn is_allowed(expression: &str, allowed: &[String]) -> Option<bool> {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let tokens: Vec<_> = spaced.split_whitespace().collect();
    let mut parser = Parser {
        tokens: &tokens,
        allowed,
    };
    let result = parser.any()?;
    parser.tokens.is_empty().then_some(result)
}

struct Parser<'a> {
    tokens: &'a [&'a str],
    allowed: &'a [String],
}

impl Parser<'_> {
    fn take(&mut self, wanted: &str) -> bool {
        let there = self.tokens.first() == Some(&wanted);
        if there {
            self.tokens = &self.tokens[1..];
        }
        there
    }

    fn any(&mut self) -> Option<bool> {
        let mut result = self.all()?;
        while self.take("OR") {
            result |= self.all()?;
        }
        Some(result)
    }

    fn all(&mut self) -> Option<bool> {
        let mut result = self.one()?;
        while self.take("AND") {
            result &= self.one()?;
        }
        Some(result)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let result = self.any()?;
            return self.take(")").then_some(result);
        }
        let (&name, rest) = self.tokens.split_first()?;
        if matches!(name, "AND" | "OR" | "WITH" | ")") {
            return None;
        }
        self.tokens = rest;
        let mut licence = name.to_owned();
        if self.take("WITH") {
            let (&exception, rest) = self.tokens.split_first()?;
            self.tokens = rest;
            licence = format!("{name} WITH {exception}");
        }
        Some(self.allowed.contains(&licence))
    }
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn one_allowed_alternative_is_enough_and_every_part_of_a_conjunction_is_needed() {
        let allowed = ["MIT", "Apache-2.0", "Unicode-3.0"].map(str::to_owned);
        let check = |expression| is_allowed(expression, &allowed);
        assert_eq!(check("MIT"), Some(true));
        assert_eq!(check("GPL-3.0-only"), Some(false));
        assert_eq!(check("MIT/Apache-2.0"), Some(true));
        assert_eq!(check("GPL-2.0 OR MIT"), Some(true));
        assert_eq!(check("GPL-2.0 AND MIT"), Some(false));
        assert_eq!(check("(MIT OR GPL-2.0) AND Unicode-3.0"), Some(true));
        assert_eq!(check("MIT OR GPL-2.0 AND Foo"), Some(true));
        assert_eq!(
            check("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT"),
            Some(true)
        );
        assert_eq!(check("Apache-2.0 WITH LLVM-exception"), Some(false));
    }

    #[test]
    fn what_is_no_expression_is_not_taken_for_one() {
        for text in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "AND"] {
            assert_eq!(is_allowed(text, &["MIT".to_owned()]), None, "{text:?}");
        }
    }
}
