//! `reports.md` is true: every report that it lists has the tests that it names.

use std::fs;
use std::path::Path;

/// The reports about metadata that this project works from.
const REPORTS: [&str; 15] = [
    "m01", "m02", "m04", "m06", "m08", "m10", "m12", "m15", "m17", "m19", "m21", "m23", "m26",
    "m28", "m30",
];

/// The text of every Rust file below `dir`.
fn sources(dir: &Path, found: &mut String) {
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            *found += &fs::read_to_string(&path).expect("text");
        }
    }
}

#[test]
fn every_report_has_a_row_and_a_test_named_for_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("tests/reports.md")).expect("the page");
    let mut code = String::new();
    sources(&root.join("src"), &mut code);
    sources(&root.join("tests"), &mut code);
    for report in REPORTS {
        let row = format!("| {} ", report.to_uppercase());
        assert!(page.lines().any(|line| line.starts_with(&row)), "{report}");
        assert!(code.contains(&format!("fn {report}_")), "{report}");
    }
}

#[test]
fn every_test_that_the_page_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("tests/reports.md")).expect("the page");
    // Names in the form `file::m01_…`; those of other crates have more parts.
    let names = page.split('`').filter_map(|name| {
        let (file, test) = name.strip_suffix('…')?.split_once("::")?;
        (!test.contains("::") && file != "store_outage").then_some((file, test))
    });
    let mut checked = 0;
    for (file, test) in names {
        let candidates = [
            format!("tests/{file}.rs"),
            format!("src/{file}.rs"),
            format!("src/{file}/tests.rs"),
            format!("src/{file}/mod.rs"),
        ];
        let there = candidates.iter().any(|path| {
            let text = fs::read_to_string(root.join(path)).unwrap_or_default();
            text.contains(&format!("fn {test}"))
        });
        assert!(there, "{file}::{test}");
        checked += 1;
    }
    assert!(checked > 20, "only {checked} names were found");
}
