//! Rules for every text file.

use std::path::Path;

use super::Breach;

/// No blanks at line ends, and one newline at the end.
pub(super) fn check(file: &Path, text: &str) -> Vec<Breach> {
    let mut breaches = Vec::new();
    let mut breach = |line, message: &str| {
        breaches.push(Breach {
            file: file.to_owned(),
            line,
            message: message.to_owned(),
        });
    };
    for (at, line) in text.split('\n').enumerate() {
        if line.ends_with([' ', '\t', '\r']) {
            breach(Some(at + 1), "blanks at the end of the line");
        }
    }
    if !text.is_empty() && (!text.ends_with('\n') || text.ends_with("\n\n")) {
        breach(None, "ends with no newline, or with more than one");
    }
    breaches
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::check;

    #[test]
    fn blanks_at_line_ends_and_missing_newlines_are_found() {
        let lines = |text| {
            check(Path::new("a.md"), text)
                .iter()
                .map(|b| b.line)
                .collect::<Vec<_>>()
        };
        assert_eq!(lines("fine\n\nfine\n"), []);
        assert_eq!(lines("a \nb\nc\t\n"), [Some(1), Some(3)]);
        assert_eq!(lines("no end"), [None]);
        assert_eq!(lines("two ends\n\n"), [None]);
    }
}
