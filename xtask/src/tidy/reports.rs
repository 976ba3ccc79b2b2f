//! The tables of reports: every test that one names is there.

use std::path::{Path, PathBuf};

use super::Breach;

/// A page with a table of reports.
struct Table {
    page: &'static str,
    /// The reports that must have a row there.
    reports: &'static [&'static str],
    /// Beginnings of rows that are no report's, and must be there too.
    scenarios: &'static [&'static str],
}

const TABLES: &[Table] = &[
    Table {
        page: "tests/REPORTS.md",
        reports: &[
            "G01", "G03", "G05", "G06", "G08", "G11", "G14", "G16", "G18", "G21", "G23", "G25",
            "G27", "G31", "G33", "G34", "H01", "H03", "H06", "H07", "H09", "H11", "H14", "H16",
            "H18", "H20", "R01", "R03", "R05", "R08", "R09", "R12", "R15",
        ],
        scenarios: &[],
    },
    Table {
        page: "crates/transport/tests/REPORTS.md",
        reports: &[
            "E01", "E02", "E03", "E06", "E08", "E12", "E14", "E17", "E20", "E21", "E24", "X01",
            "X04", "X06", "X07", "X10", "X13", "X15", "X18", "X20",
        ],
        scenarios: &[
            "40 GID events with nothing changed",
            "the same bytes at a new index",
            "an unrelated row takes a lower index",
            "link-local only, then the address elsewhere",
            "the store is down through two renumberings",
            "killed and restarted under the same name",
            "both ends lose a rail in the same instant",
            "a control verb of one NIC hangs for a minute",
            "a rail on which nothing completes and no event comes",
            "1 000 flaps",
        ],
    },
    Table {
        page: "crates/metadata/tests/REPORTS.md",
        reports: &[
            "M01", "M02", "M04", "M06", "M08", "M10", "M12", "M15", "M17", "M19", "M21", "M23",
            "M26", "M28", "M30",
        ],
        scenarios: &[],
    },
];

pub(super) fn check(root: &Path) -> Vec<Breach> {
    let tables = TABLES.iter();
    tables.flat_map(|table| check_table(root, table)).collect()
}

/// Tests are named as `path/from/the/root.rs::name`, in code quotes. Each report has one whose name
/// begins with, or holds, its number; a row that is no report's has one of any name.
fn check_table(root: &Path, table: &Table) -> Vec<Breach> {
    let breach = |line, message| Breach {
        file: PathBuf::from(table.page),
        line,
        message,
    };
    let Ok(text) = std::fs::read_to_string(root.join(table.page)) else {
        return vec![breach(None, "it is missing".to_owned())];
    };
    let mut breaches = Vec::new();
    let mut missing: Vec<_> = table.reports.to_vec();
    let mut unseen: Vec<_> = table.scenarios.to_vec();
    for (index, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix("| ") else {
            continue;
        };
        let line = Some(index + 1);
        for (file, name) in named(row) {
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
            if !text.contains(&format!("fn {name}(")) && !text.contains(&format!("\"{name}\"")) {
                breaches.push(breach(line, format!("{file} has no test `{name}`")));
            }
        }
        let report = table.reports.iter().find(|report| {
            let rest = row.strip_prefix(**report);
            rest.is_some_and(|rest| rest.starts_with(' '))
        });
        missing.retain(|missing| Some(missing) != report);
        unseen.retain(|begin| !row.starts_with(*begin));
        let number = report.map_or(String::new(), |report| {
            format!("{}_", report.to_lowercase())
        });
        let is_head = row.starts_with("report |") || row.starts_with("scenario |");
        let is_tested = named(row).any(|(_, name)| name.contains(&number));
        if !is_head && !is_tested && !row.contains("does not apply") {
            let message =
                format!("a row without a test `{number}…`; if the report does not apply, say why");
            breaches.push(breach(line, message));
        }
    }
    for report in missing.into_iter().chain(unseen) {
        breaches.push(breach(None, format!("{report} has no row")));
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
