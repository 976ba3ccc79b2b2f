//! `cargo xtask consumers`: each library crate as its users get it.
//!
//! For each crate and each Rust example of its README a scratch project outside the tree, made of
//! what a reader copies: the block of dependencies before the example, and the example as it
//! stands. It compiles without a warning and runs. Then `cargo package`, which builds what would be
//! published. What only works inside this workspace, thanks to a neighbour's features, fails.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{process, workspace};

/// Directories of the library crates, below `crates/`.
const CONSUMERS: &[&str] = &["verbs", "topology", "metadata", "transport", "engine"];
/// How a README names a checkout.
const CHECKOUT: &str = "path = \"../rerail/";

/// Runs all of them, then packages the workspace; with `verify` each package is built from what
/// would be published.
pub(crate) fn run(verify: bool) -> Result<()> {
    let scratch = Scratch::create()?;
    for name in CONSUMERS {
        let page = workspace::root()
            .join("crates")
            .join(name)
            .join("README.md");
        let text = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
        let examples = examples(&text).with_context(|| page.display().to_string())?;
        ensure!(!examples.is_empty(), "{} has no example", page.display());
        for example in &examples {
            println!("consumers: {name}: the README's line {}", example.line);
            let dir = scratch.project(name, example)?;
            // One target directory for all: they share most dependencies.
            let mut command = process::cargo();
            command
                .current_dir(&dir)
                .env("CARGO_TARGET_DIR", workspace::target().join("consumers"))
                .env("RUSTFLAGS", "-D warnings")
                // Nobody debugs them, and nothing is built twice.
                .env("CARGO_PROFILE_DEV_DEBUG", "false")
                .env("CARGO_INCREMENTAL", "0")
                .args(["run", "--quiet"]);
            process::run(&mut command).with_context(|| {
                format!("line {} of {} does not hold", example.line, page.display())
            })?;
        }
    }
    println!("consumers: cargo package");
    let mut package = process::cargo();
    // Dirty trees are packaged too: this is a check, nothing is published.
    package.args([
        "package",
        "--workspace",
        "--locked",
        "--allow-dirty",
        "--quiet",
    ]);
    if !verify {
        package.arg("--no-verify");
    }
    process::run(&mut package)
}

/// An example of a README, as a reader copies it.
#[derive(PartialEq, Eq, Debug)]
struct Example {
    /// Line of its fence.
    line: usize,
    /// The last block of TOML before it.
    dependencies: String,
    program: String,
}

/// All examples in Rust of a page.
fn examples(page: &str) -> Result<Vec<Example>> {
    let mut found = Vec::new();
    let mut dependencies = None;
    let mut lines = (1..).zip(page.lines());
    while let Some((line, text)) = lines.next() {
        let Some(language) = text.strip_prefix("```") else {
            continue;
        };
        let block: Vec<&str> = lines
            .by_ref()
            .map(|(_, text)| text)
            .take_while(|text| text.trim() != "```")
            .collect();
        let block = block.join("\n") + "\n";
        if language == "toml" {
            dependencies = Some(block);
        } else if language.is_empty() || language.starts_with("rust") {
            let hidden = |line: &str| line == "#" || line.starts_with("# ");
            // rustdoc hides them, and every other viewer shows them.
            ensure!(
                !block.lines().any(hidden),
                "line {line}: the example has lines that begin with `# `, which do not compile \
                 where it is pasted"
            );
            ensure!(
                !block.contains("cfg(feature"),
                "line {line}: the example depends on a feature of the reader's project"
            );
            let dependencies = dependencies
                .clone()
                .with_context(|| format!("line {line}: no block of TOML before the example"))?;
            found.push(Example {
                line,
                dependencies,
                program: block,
            });
        }
    }
    Ok(found)
}

/// A directory outside the tree, removed with this value.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("rerail-consumers-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    /// Lays out the project of one example.
    fn project(&self, name: &str, example: &Example) -> Result<PathBuf> {
        let root = workspace::root();
        let dir = self.path.join(format!("{name}-{}", example.line));
        fs::create_dir_all(dir.join("src"))?;
        fs::write(dir.join("src/main.rs"), &example.program)?;
        // The versions that the workspace is tested with.
        fs::copy(root.join("Cargo.lock"), dir.join("Cargo.lock"))?;
        fs::write(dir.join("Cargo.toml"), manifest(example, &root))?;
        Ok(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn manifest(example: &Example, root: &Path) -> String {
    let here = format!("path = \"{}/", root.display());
    format!(
        "[package]\nname = \"consumer\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n{}",
        example.dependencies.replace(CHECKOUT, &here)
    )
}

#[cfg(test)]
mod tests {
    use super::examples;

    #[test]
    fn each_rust_block_is_taken_as_it_stands_with_the_dependencies_before_it() {
        let page = "# X\n```sh\nls\n```\n```toml\n[dependencies]\na = \"1\"\n```\n```rust\nfn main() {}\n```\n\
                    ```toml\nb\n```\n```rust,no_run\n#![allow(a)]\nfn main() { f() }\n```\n";
        let found = examples(page).expect("two");
        let found: Vec<_> = found
            .iter()
            .map(|example| (example.line, &*example.dependencies, &*example.program))
            .collect();
        assert_eq!(
            found,
            [
                (9, "[dependencies]\na = \"1\"\n", "fn main() {}\n"),
                (15, "b\n", "#![allow(a)]\nfn main() { f() }\n"),
            ]
        );
    }

    #[test]
    fn what_does_not_work_where_it_is_pasted_is_refused() {
        for (page, why) in [
            ("```rust\nfn main() {}\n```\n", "no block of TOML"),
            (
                "```toml\n```\n```rust\n# fn main() {\n# }\n```\n",
                "begin with",
            ),
            (
                "```toml\n```\n```rust\n#[cfg(feature = \"sim\")]\nfn main() {}\n```\n",
                "a feature of the reader's",
            ),
        ] {
            let error = examples(page).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
