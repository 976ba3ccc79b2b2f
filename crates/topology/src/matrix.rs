//! The priority matrix: for each location the NICs near it, and the others.

use std::collections::BTreeSet;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::rail::Rail;
use crate::scan::{Gpu, Nic, listed, natural, visible};
use crate::{Distance, Place, Scan, TopologyError};

/// Most locations of a matrix that somebody else made.
const LOCATIONS_MAX: usize = 4_096;

/// The NICs of one location, by the names under which they are published.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MatrixEntry {
    /// The nearest; all equally near ones share the work.
    pub preferred: Vec<String>,
    /// All others.
    pub available: Vec<String>,
}

impl MatrixEntry {
    /// All names, the preferred first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let all = self.preferred.iter().chain(&self.available);
        all.map(String::as_str)
    }
}

/// `{"<location>": [[preferred], [available]], …}`, as published and as in a custom topology. The
/// order of locations is kept.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Matrix {
    entries: Vec<(String, MatrixEntry)>,
}

impl Matrix {
    /// The matrix of what was found: an entry for each NUMA node, and one for each GPU in the order
    /// in which its maker's library counts.
    ///
    /// `cuda_visible` is the text of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub fn discover(scan: &Scan, rails: &[Rail], cuda_visible: Option<&str>) -> Self {
        let mut entries = Vec::new();
        for node in &scan.nodes {
            let near = |rail: &Rail| {
                // A NIC of unknown node is as near to this one as to any.
                let of_rail = scan.nic(&rail.device).and_then(|nic| nic.numa_node);
                of_rail.is_none_or(|of_rail| of_rail == *node)
            };
            entries.push((format!("cpu:{node}"), split(rails, near)));
        }
        for (location, gpu) in numbered(&scan.gpus, cuda_visible) {
            let keys: Vec<_> = rails.iter().map(|rail| key(scan, gpu, rail)).collect();
            let best = keys.iter().min().copied();
            let mut keys = keys.iter();
            let near = |_: &Rail| keys.next().copied() == best;
            entries.push((location, split(rails, near)));
        }
        Self { entries }
    }

    /// Reads a matrix of one's own machine. Names are not checked; [`check_names`] does that.
    ///
    /// # Errors
    ///
    /// Anything that is not of the form above, a location twice, or a location of unknown form,
    /// with line and column; `document` names the text.
    ///
    /// [`check_names`]: Self::check_names
    pub fn parse(text: &str, document: &str) -> Result<Self, TopologyError> {
        let mut parser = serde_json::Deserializer::from_str(text);
        let strict = parser.deserialize_map(MatrixVisitor { strict: true });
        let matrix = strict.and_then(|matrix| parser.end().map(|()| matrix));
        matrix.map_err(|error| crate::document::malformed(document, &error))
    }

    /// Checks that every name is one of `known`; `text` is what the matrix was read from.
    ///
    /// # Errors
    ///
    /// The first name that is not, with line and column, and all others that are not.
    pub fn check_names(
        &self,
        known: &BTreeSet<&str>,
        text: &str,
        document: &str,
    ) -> Result<(), TopologyError> {
        let names: BTreeSet<_> = self.names().collect();
        let unknown: Vec<_> = names.difference(known).copied().collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let places = unknown.iter().map(|name| place(text, name));
        let (line, column) = places.min().unwrap_or((0, 0));
        // A port may be named with any of them; to list every port would hide the names.
        let known = known.iter().filter(|name| !name.contains(':'));
        let known: Vec<_> = known.copied().collect();
        let known = if known.is_empty() {
            "none".to_owned()
        } else {
            known.join(", ")
        };
        Err(TopologyError::Malformed {
            document: document.to_owned(),
            line,
            column,
            reason: format!(
                "this machine has no NIC named {}; it has {known}",
                unknown.join(", ")
            ),
        })
    }

    /// The entry of a location. `*` has all NICs as preferred, whether it is listed or not.
    pub fn entry(&self, location: &str) -> Option<MatrixEntry> {
        if location == "*" {
            return Some(MatrixEntry {
                preferred: self.names().map(str::to_owned).collect(),
                available: Vec::new(),
            });
        }
        let mut entries = self.entries.iter();
        let (_, entry) = entries.find(|(known, _)| known == location)?;
        Some(entry.clone())
    }

    /// Locations and entries, in order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &MatrixEntry)> {
        self.entries
            .iter()
            .map(|(location, entry)| (location.as_str(), entry))
    }

    /// Every NIC's name once, in order of first appearance.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let mut seen = BTreeSet::new();
        let all = self.entries.iter().flat_map(|(_, entry)| entry.names());
        all.filter(move |name| seen.insert(*name))
    }

    /// Gives each name the one that `published` knows for it; what it does not know is taken out.
    pub fn rename(&mut self, published: impl Fn(&str) -> Option<String>) {
        for (_, entry) in &mut self.entries {
            let renamed =
                |names: &[String]| names.iter().filter_map(|name| published(name)).collect();
            *entry = tidy(renamed(&entry.preferred), renamed(&entry.available));
        }
    }
}

/// Preferred are those that are near; each keeps the order of `rails`.
fn split(rails: &[Rail], mut near: impl FnMut(&Rail) -> bool) -> MatrixEntry {
    let mut entry = MatrixEntry::default();
    for rail in rails {
        let list = if near(rail) {
            &mut entry.preferred
        } else {
            &mut entry.available
        };
        list.push(rail.name.clone());
    }
    entry
}

/// Near before far; at equal distance, not known to be of another NUMA node before known.
fn key(scan: &Scan, gpu: &Gpu, rail: &Rail) -> (Distance, bool) {
    let unknown = Place {
        pci: None,
        numa_node: None,
    };
    let nic = scan.nic(&rail.device).map_or(unknown, Nic::place);
    let nodes = gpu.numa_node.zip(nic.numa_node);
    let apart = nodes.is_some_and(|(left, right)| left != right);
    (Distance::between(gpu.place(), nic), apart)
}

/// GPUs with the location of each: numbers count per maker, from 0.
pub(crate) fn numbered<'g>(gpus: &'g [Gpu], cuda_visible: Option<&str>) -> Vec<(String, &'g Gpu)> {
    let mut prefixes: Vec<_> = gpus
        .iter()
        .map(|gpu| gpu.vendor.location_prefix())
        .collect();
    prefixes.sort_unstable();
    prefixes.dedup();
    let mut numbered = Vec::new();
    for prefix in prefixes {
        let of_maker = gpus
            .iter()
            .filter(|gpu| gpu.vendor.location_prefix() == prefix);
        let mut of_maker: Vec<_> = listed(of_maker.collect());
        if let Some(text) = cuda_visible.filter(|_| prefix == "cuda") {
            of_maker = visible(&of_maker, text);
        }
        let with_number = of_maker.into_iter().enumerate();
        numbered.extend(with_number.map(|(number, gpu)| (format!("{prefix}:{number}"), gpu)));
    }
    numbered
}

/// Line and column, from 1, of a name's first appearance as a JSON string.
fn place(text: &str, name: &str) -> (usize, usize) {
    let quoted = serde_json::Value::from(name).to_string();
    let Some(at) = text.find(&quoted) else {
        return (0, 0);
    };
    let before = &text[..at];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = before.matches('\n').count() + 1;
    (line, before[line_start..].chars().count() + 1)
}

impl Serialize for Matrix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.entries.len()))?;
        for (location, entry) in &self.entries {
            map.serialize_entry(location, &(&entry.preferred, &entry.available))?;
        }
        map.end()
    }
}

/// A peer's matrix: any location is taken, since peers may know kinds of memory that we do not.
impl<'de> Deserialize<'de> for Matrix {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MatrixVisitor { strict: false })
    }
}

struct MatrixVisitor {
    strict: bool,
}

impl<'de> Visitor<'de> for MatrixVisitor {
    type Value = Matrix;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object {\"<location>\": [[preferred NICs], [available NICs]], …}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Matrix, A::Error> {
        let mut matrix = Matrix::default();
        let mut seen = BTreeSet::new();
        while let Some(location) = map.next_key::<String>()? {
            if self.strict {
                if let Err(error) = location.parse::<crate::Location>() {
                    return Err(de::Error::custom(error));
                }
                if !seen.insert(location.clone()) {
                    return Err(de::Error::custom(format!(
                        "location {location:?} is listed twice"
                    )));
                }
            }
            if matrix.entries.len() >= LOCATIONS_MAX {
                return Err(de::Error::custom(format!(
                    "more than {LOCATIONS_MAX} locations"
                )));
            }
            let (preferred, available) = map.next_value::<(Vec<String>, Vec<String>)>()?;
            matrix.entries.push((location, tidy(preferred, available)));
        }
        Ok(matrix)
    }
}

/// A name counts once in an entry, at its first appearance, as it does for other engines.
fn tidy(mut preferred: Vec<String>, mut available: Vec<String>) -> MatrixEntry {
    let mut seen = BTreeSet::new();
    preferred.retain(|name| seen.insert(name.clone()));
    available.retain(|name| seen.insert(name.clone()));
    MatrixEntry {
        preferred,
        available,
    }
}

/// Orders names as people count: `mlx5_2` before `mlx5_10`.
pub(crate) fn sort_naturally(names: &mut [String]) {
    names.sort_by(|left, right| natural(left).cmp(&natural(right)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Matrix, TopologyError> {
        Matrix::parse(text, "matrix.json")
    }

    /// The reference's expectations (transfer-engine.md 4.8), as far as they are about the matrix.
    #[test]
    fn the_reference_cases_hold() {
        let names = |text: &str| parse(text).expect("a matrix").names().count();
        assert_eq!(names(r#"{"cpu:0":[["a"],["b"]],"cpu:1":[["b"],["a"]]}"#), 2);
        assert_eq!(
            names(r#"{"cpu:0":[["a","a"],["a"]],"cpu:1":[["a"],["a"]]}"#),
            1
        );
        assert_eq!(names(r#"{"cpu:0":[["a"],["b"]],"cpu:1":[["c"],["d"]]}"#), 4);
        let text = r#"{"cpu:1":[["a"],["b"]],"cpu:0":[["b"],[]],"gpu:0":[[],[]]}"#;
        let matrix = parse(text).expect("a matrix");
        assert_eq!(
            serde_json::to_string(&matrix).expect("JSON"),
            text,
            "order is kept"
        );
        let any = matrix.entry("*").expect("always there");
        assert_eq!(any.preferred, ["a", "b"]);
        assert!(any.available.is_empty());
    }

    #[test]
    fn malformed_entries_are_errors_with_line_and_column() {
        let cases = [
            ("{\n \"cpu:0\": [[\"a\"]]\n}", 2),
            ("{\n \"cpu:0\": [[\"a\"],[\"b\"],[\"c\"]]\n}", 2),
            ("{\n \"cpu:0\": [\"a\",\"b\"]\n}", 2),
            ("{\n \"cpu:0\": [[1],[]]\n}", 2),
            ("{\n \"cpu:0\": [[],[]],\n \"cpu:0\": [[],[]]\n}", 3),
            ("{\n\n \"socket zero\": [[],[]]\n}", 3),
            ("[]", 1),
            ("{} x", 1),
            ("", 1),
        ];
        for (text, expected) in cases {
            match parse(text) {
                Err(TopologyError::Malformed { line, .. }) => assert_eq!(line, expected, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn unknown_names_are_errors_that_name_them_and_their_place() {
        let text = "{\n  \"cpu:0\": [[\"mlx5_0\", \"mlx_bond_1\"],\n  [\"mlx_bond_4\"]]\n}";
        let matrix = parse(text).expect("a matrix");
        let known = BTreeSet::from(["mlx5_0", "mlx5_bond_1"]);
        let error = matrix
            .check_names(&known, text, "matrix.json")
            .expect_err("unknown");
        let words = error.to_string();
        for part in [
            "mlx_bond_1",
            "mlx_bond_4",
            "line 2, column 24",
            "mlx5_bond_1",
        ] {
            assert!(words.contains(part), "{part} is not in {words}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_survived(text: String) {
            if let Ok(matrix) = parse(&text) {
                let again = serde_json::to_string(&matrix).expect("JSON");
                proptest::prop_assert_eq!(parse(&again).expect("its own form"), matrix);
            }
        }
    }
}
