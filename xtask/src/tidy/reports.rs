//! The tables of reports: every test that one names is there.

use std::path::{Path, PathBuf};

use super::Breach;

/// The table of reports about GIDs, handshakes and memory.
const TABLE: &str = "tests/REPORTS.md";

/// Tests are named as `path/from/the/root.rs::name`, in code quotes.
pub(super) fn check(root: &Path) -> Vec<Breach> {
    let breach = |line, message| Breach {
        file: PathBuf::from(TABLE),
        line,
        message,
    };
    let Ok(table) = std::fs::read_to_string(root.join(TABLE)) else {
        return vec![breach(None, "it is missing".to_owned())];
    };
    let mut breaches = Vec::new();
    for (index, line) in table.lines().enumerate() {
        for (file, name) in named(line) {
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
            if !text.contains(&format!("fn {name}(")) && !text.contains(&format!("\"{name}\"")) {
                let message = format!("{file} has no test `{name}`");
                breaches.push(breach(Some(index + 1), message));
            }
        }
        let is_row =
            line.starts_with("| ") && line.chars().nth(3).is_some_and(|c| c.is_ascii_digit());
        if is_row && named(line).next().is_none() && !line.contains("does not apply") {
            let message = "a report without a test; if it does not apply, say why".to_owned();
            breaches.push(breach(Some(index + 1), message));
        }
    }
    breaches
}

/// File and name of each test in a line.
fn named(line: &str) -> impl Iterator<Item = (&str, &str)> {
    line.split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|quoted| quoted.split_once("::"))
        .filter(|(file, _)| file.ends_with(".rs"))
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn tests_are_found_between_code_quotes() {
        let line = "| G01 | `a/b.rs::g01_x`, `other` and `c.rs::y` |";
        let found: Vec<_> = named(line).collect();
        assert_eq!(found, [("a/b.rs", "g01_x"), ("c.rs", "y")]);
    }
}
