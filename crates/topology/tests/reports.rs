//! `REPORTS.md` is true: each test that it names exists where it says.

use std::path::Path;

const PAGE: &str = include_str!("REPORTS.md");
/// The rows about topology in the list of reports.
const ROWS: [&str; 10] = [
    "T01", "T03", "T05", "T07", "T09", "T11", "T13", "T16", "T18", "T21",
];

/// Words in backquotes.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

#[test]
fn every_test_that_the_page_names_exists() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = 0;
    for row in PAGE.lines().filter(|line| line.starts_with("| ")) {
        let tests = row.split('|').nth(3).expect("a third column");
        let mut source = String::new();
        for word in quoted(tests) {
            if word.ends_with(".rs") {
                source = std::fs::read_to_string(crates.join(word)).expect(word);
            } else {
                assert!(source.contains(&format!("fn {word}(")), "{word}: {row}");
                found += 1;
            }
        }
    }
    assert!(found >= 18, "only {found} tests are named");
}

#[test]
fn every_report_has_a_test_named_for_it() {
    for report in ROWS {
        let mut rows = PAGE.lines();
        let row = rows.find(|line| line.starts_with(&format!("| {report} ")));
        let start = format!("{}_", report.to_lowercase());
        let named = quoted(row.expect(report)).any(|word| word.starts_with(&start));
        assert!(named, "{report}");
    }
}
