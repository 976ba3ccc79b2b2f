//! Rules for the graph of packages: licences, the oldest compiler, and which crate may use which.
//!
//! `deny.toml` holds the licences for cargo-deny and for us, so that a machine without cargo-deny
//! checks the same. Advisories are cargo-deny's alone: they need its database.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Breach, licence};
use crate::process;

/// Packages whose manifest names a licence file only, and what that file holds.
const LICENCE_FILES: &[(&str, &str, &str)] = &[("rdma-sys", "LICENSE", "MIT")];
/// Our crates from the bottom up: each may use those before it, and no other.
const LAYERS: &[&str] = &[
    "rerail-verbs",
    "rerail-topology",
    "rerail-metadata",
    "rerail-transport",
    "rerail-engine",
    "rerail",
];
/// Neighbours in `LAYERS` that nevertheless do not know each other.
const STRANGERS: &[(&str, &str)] = &[("rerail-metadata", "rerail-topology")];

pub(super) fn check(root: &Path) -> Result<Vec<Breach>> {
    let metadata =
        process::output(process::cargo().args(["metadata", "--format-version=1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata's output")?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let allowed = allowed_licences(&std::fs::read_to_string(root.join("deny.toml"))?)?;
    let oldest = std::fs::read_to_string(root.join("Cargo.toml"))?
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = ").and_then(version))
        .context("the workspace declares no rust-version")?;

    let mut messages = Vec::new();
    for package in packages {
        messages.extend(licence_problem(package, &allowed));
        messages.extend(compiler_problem(package, oldest));
        messages.extend(layer_problems(package));
    }
    let file = PathBuf::from("Cargo.lock");
    Ok(messages
        .into_iter()
        .map(|message| Breach {
            file: file.clone(),
            line: None,
            message,
        })
        .collect())
}

fn name(package: &Value) -> &str {
    package["name"].as_str().unwrap_or("?")
}

fn licence_problem(package: &Value, allowed: &[String]) -> Option<String> {
    let name = name(package);
    let expression = match (
        package["license"].as_str(),
        package["license_file"].as_str(),
    ) {
        (Some(expression), _) => expression,
        (None, Some(file)) => {
            let known = LICENCE_FILES
                .iter()
                .find(|(known, path, _)| *known == name && *path == file);
            match known {
                Some((_, _, expression)) => expression,
                None => return Some(format!("{name}: unknown licence in its file {file}")),
            }
        }
        (None, None) => return Some(format!("{name}: no licence")),
    };
    match licence::is_allowed(expression, allowed) {
        Some(true) => None,
        Some(false) => Some(format!(
            "{name}: licence `{expression}` is not in deny.toml"
        )),
        None => Some(format!("{name}: `{expression}` is no licence expression")),
    }
}

fn compiler_problem(package: &Value, oldest: (u64, u64)) -> Option<String> {
    let needed = package["rust_version"].as_str()?;
    (version(needed)? > oldest).then(|| {
        format!(
            "{} needs Rust {needed}, newer than the workspace's",
            name(package)
        )
    })
}

/// Major and minor of `1.88`, `1.88.0` or `"1.88"`.
fn version(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text
        .trim_matches('"')
        .split('.')
        .map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next().flatten().unwrap_or(0)))
}

fn layer_problems(package: &Value) -> Vec<String> {
    let user = name(package);
    let Some(layer) = LAYERS.iter().position(|crate_name| *crate_name == user) else {
        return Vec::new();
    };
    let dependencies = package["dependencies"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let used = dependencies.iter().map(name);
    used.filter(|used| {
        let above = LAYERS
            .iter()
            .position(|crate_name| crate_name == used)
            .is_some_and(|at| at >= layer);
        above || STRANGERS.contains(&(user, used))
    })
    .map(|used| format!("{user} uses {used}: arrows between the crates point down only"))
    .collect()
}

/// The strings of `allow = [ … ]` in the `[licenses]` table of deny.toml.
fn allowed_licences(deny: &str) -> Result<Vec<String>> {
    let table = deny
        .split_once("[licenses]")
        .context("deny.toml has no [licenses]")?
        .1;
    let list = table
        .split_once("allow = [")
        .context("deny.toml allows no licences")?
        .1;
    let list = list
        .split_once(']')
        .context("the list of licences in deny.toml has no end")?
        .0;
    let allowed: Vec<_> = list
        .lines()
        .filter_map(|line| line.split('#').next())
        .flat_map(|line| line.split(','))
        .map(|item| item.trim().trim_matches('"').to_owned())
        .filter(|item| !item.is_empty())
        .collect();
    if allowed.is_empty() {
        bail!("deny.toml allows no licences");
    }
    Ok(allowed)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{allowed_licences, compiler_problem, layer_problems, licence_problem};

    #[test]
    fn licences_come_from_deny_toml() {
        let deny =
            "[bans]\nallow = [\"x\"]\n[licenses]\nallow = [\n  \"MIT\", # short\n  \"ISC\",\n]\n";
        assert_eq!(allowed_licences(deny).expect("a list"), ["MIT", "ISC"]);
        assert!(allowed_licences("[licenses]\nallow = []\n").is_err());
    }

    #[test]
    fn a_package_without_a_known_licence_is_a_breach() {
        let allowed = ["MIT".to_owned()];
        let problem = |package| licence_problem(&package, &allowed);
        assert_eq!(problem(json!({"name": "a", "license": "MIT"})), None);
        assert!(problem(json!({"name": "a", "license": "GPL-3.0"})).is_some());
        assert!(problem(json!({"name": "a"})).is_some());
        assert!(problem(json!({"name": "a", "license_file": "LICENSE"})).is_some());
        assert_eq!(
            problem(json!({"name": "rdma-sys", "license_file": "LICENSE"})),
            None
        );
    }

    #[test]
    fn a_package_for_newer_compilers_is_a_breach() {
        let problem =
            |needed| compiler_problem(&json!({"name": "a", "rust_version": needed}), (1, 88));
        assert_eq!(problem("1.88.0"), None);
        assert_eq!(problem("1.56"), None);
        assert!(problem("1.89").is_some());
    }

    #[test]
    fn arrows_between_the_crates_point_down_only() {
        let uses =
            |user, used| layer_problems(&json!({"name": user, "dependencies": [{"name": used}]}));
        assert!(uses("rerail-engine", "rerail-verbs").is_empty());
        assert!(uses("rerail-engine", "serde").is_empty());
        assert_eq!(uses("rerail-transport", "rerail-engine").len(), 1);
        assert_eq!(uses("rerail-metadata", "rerail-topology").len(), 1);
    }
}
