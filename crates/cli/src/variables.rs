//! Variables of the environment that look like settings and are none.

use rerail_engine::settings::VARIABLES;

/// Variables of the program that are not an engine's.
const OWN: &[&str] = &["RERAIL_LOG", "RERAIL_METADATA"];
/// Beginnings of variables of the project's tests and tools.
const OF_TESTS: &[&str] = &[
    "RERAIL_BIN",
    "RERAIL_CPP_",
    "RERAIL_DEVICE_TESTS",
    "RERAIL_FULL",
    "RERAIL_INTERPOSE",
    "RERAIL_OUT",
    "RERAIL_REQUIRE_",
    "RERAIL_SERVER_BIN",
    "RERAIL_SIM_",
    "RERAIL_TEST_",
    "RERAIL_VERBS_TEST_",
];
/// Letters that may be wrong in a name for it to be taken for another.
const TYPOS_MAX: usize = 4;

/// Warns of each variable that begins with `RERAIL_` and is not known. Its value, which may be a
/// secret, is not shown.
pub(crate) fn warn_of_unknown() {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if !is_unknown(&name) {
            continue;
        }
        match nearest(&name) {
            Some(nearest) => tracing::warn!("{name} is no setting: did you mean {nearest}?"),
            None => tracing::warn!("{name} is no setting: it changes nothing"),
        }
    }
}

fn known() -> impl Iterator<Item = &'static str> {
    VARIABLES.iter().chain(OWN).copied()
}

fn is_unknown(name: &str) -> bool {
    name.starts_with("RERAIL_")
        && !OF_TESTS.iter().any(|prefix| name.starts_with(prefix))
        && !known().any(|known| known == name)
}

fn nearest(name: &str) -> Option<&'static str> {
    known()
        .map(|known| (strsim::damerau_levenshtein(name, known), known))
        .min()
        .filter(|(distance, _)| *distance <= TYPOS_MAX)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::{is_unknown, nearest};

    #[test]
    fn a_typo_is_found_with_the_name_that_was_meant() {
        assert!(is_unknown("RERAIL_TRANSFER_TIMOUT"));
        assert_eq!(
            nearest("RERAIL_TRANSFER_TIMOUT"),
            Some("RERAIL_TRANSFER_TIMEOUT")
        );
        assert_eq!(nearest("RERAIL_SOMETHING_ELSE_ENTIRELY"), None);
        for known in ["RERAIL_MTU", "RERAIL_LOG", "RERAIL_SIM_SEED", "MC_ANYTHING"] {
            assert!(!is_unknown(known), "{known}");
        }
    }
}
