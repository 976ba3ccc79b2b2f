//! One build of everything that tests, demo and guest run.
//!
//! Cargo unifies features over the packages it is asked to build: asking for the same selection
//! each time, the whole workspace with its tests, keeps it from building the same crate twice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process;

/// Name of the test targets that need devices: `tests/soft_roce.rs` of any crate. Without devices
/// they leave themselves out; in the guest they must not.
const DEVICE_TEST: &str = "soft_roce";

/// What cargo built: programs by name, and device tests by crate.
pub(crate) struct Artifacts {
    programs: BTreeMap<String, PathBuf>,
    device_tests: Vec<(String, PathBuf)>,
}

impl Artifacts {
    /// Builds the workspace's programs and tests in the dev profile.
    pub(crate) fn build() -> Result<Self> {
        let mut command = process::cargo();
        command.args(["build", "--locked", "--workspace", "--bins", "--tests"]);
        let shown = process::shown(&command);
        let output = command
            .arg("--message-format=json-render-diagnostics")
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start `{shown}`"))?;
        if !output.status.success() {
            bail!("`{shown}` failed: {}", output.status);
        }
        Self::parse(&String::from_utf8_lossy(&output.stdout))
    }

    fn parse(messages: &str) -> Result<Self> {
        let mut artifacts = Self {
            programs: BTreeMap::new(),
            device_tests: Vec::new(),
        };
        for line in messages.lines().filter(|line| line.starts_with('{')) {
            let message: Value = serde_json::from_str(line).context("cargo's messages")?;
            let Some(path) = message["executable"].as_str() else {
                continue;
            };
            let name = message["target"]["name"].as_str().unwrap_or_default();
            let test = message["profile"]["test"].as_bool().unwrap_or_default();
            if !test {
                artifacts.programs.insert(name.to_owned(), path.into());
            } else if name == DEVICE_TEST {
                artifacts
                    .device_tests
                    .push((crate_name(&message), path.into()));
            }
        }
        artifacts.device_tests.sort();
        Ok(artifacts)
    }

    /// The executable of one of the workspace's programs.
    pub(crate) fn program(&self, name: &str) -> Result<&Path> {
        let path = self.programs.get(name);
        path.map(PathBuf::as_path)
            .with_context(|| format!("the workspace has no program `{name}`"))
    }

    /// Test executables that need devices, with their crates' names.
    pub(crate) fn device_tests(&self) -> &[(String, PathBuf)] {
        &self.device_tests
    }
}

/// The package's name out of cargo's id: `path+file:///…/crates/verbs#rerail-verbs@0.1.0`, or
/// `path+file:///…/xtask#0.1.0` where the directory has the same name.
fn crate_name(message: &Value) -> String {
    let id = message["package_id"].as_str().unwrap_or_default();
    let (path, fragment) = id.rsplit_once('#').unwrap_or((id, ""));
    match fragment.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => path.rsplit('/').next().unwrap_or_default().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Artifacts;

    #[test]
    fn programs_and_device_tests_are_found_in_what_cargo_prints() {
        let line = |package: &str, target: &str, test: bool, path: Option<&str>| {
            json!({
                "reason": "compiler-artifact",
                "package_id": format!("path+file:///x/{package}"),
                "target": {"name": target},
                "profile": {"test": test},
                "executable": path,
            })
            .to_string()
        };
        let messages = [
            line(
                "crates/cli#rerail@0.1.0",
                "rerail",
                false,
                Some("/t/rerail"),
            ),
            line(
                "crates/cli#rerail@0.1.0",
                "rerail",
                true,
                Some("/t/deps/rerail-1"),
            ),
            line(
                "crates/verbs#rerail-verbs@0.1.0",
                "soft_roce",
                true,
                Some("/t/deps/soft_roce-1"),
            ),
            line("xtask#0.1.0", "xtask", false, Some("/t/xtask")),
            line(
                "crates/verbs#rerail-verbs@0.1.0",
                "rerail_verbs",
                false,
                None,
            ),
        ];
        let artifacts = Artifacts::parse(&messages.join("\n")).expect("messages");
        assert_eq!(
            artifacts.program("rerail").expect("it").to_str(),
            Some("/t/rerail")
        );
        assert!(artifacts.program("rerail_verbs").is_err());
        assert_eq!(artifacts.device_tests().len(), 1);
        assert_eq!(artifacts.device_tests()[0].0, "rerail-verbs");
    }
}
