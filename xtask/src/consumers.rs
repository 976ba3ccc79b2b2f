//! `cargo xtask consumers`: each library crate as its users get it.
//!
//! For each crate a scratch workspace outside the tree, default features off, that compiles and
//! runs the first Rust example of the crate's README; then `cargo package`, which builds what would
//! be published. What only works inside this workspace, thanks to a neighbour's features, fails.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{process, workspace};

/// A library crate and what its README's example needs.
struct Consumer {
    /// Directory below `crates/`.
    dir: &'static str,
    package: &'static str,
    features: &'static [&'static str],
    /// Dependencies of the example, by their names in the workspace's table.
    also: &'static [&'static str],
}

const CONSUMERS: &[Consumer] = &[
    Consumer {
        dir: "verbs",
        package: "rerail-verbs",
        features: &[],
        also: &[],
    },
    Consumer {
        dir: "topology",
        package: "rerail-topology",
        features: &[],
        also: &[],
    },
    Consumer {
        dir: "metadata",
        package: "rerail-metadata",
        features: &[],
        also: &["tokio"],
    },
    Consumer {
        dir: "transport",
        package: "rerail-transport",
        features: &[],
        also: &["rerail-verbs", "tokio"],
    },
    Consumer {
        dir: "engine",
        package: "rerail-engine",
        features: &[],
        also: &["rerail-verbs"],
    },
];

/// Runs all of them, then packages the workspace; with `verify` each package is built from what
/// would be published.
pub(crate) fn run(verify: bool) -> Result<()> {
    let scratch = Scratch::create()?;
    for consumer in CONSUMERS {
        let example = readme_example(consumer)?;
        let dir = scratch.project(consumer, &example)?;
        println!(
            "consumers: {}: the README's example, {:?}",
            consumer.package, consumer.features
        );
        // One target directory for all: they share most dependencies.
        let mut command = process::cargo();
        command
            .current_dir(&dir)
            .env("CARGO_TARGET_DIR", workspace::target().join("consumers"))
            .env("RUSTFLAGS", "-D warnings")
            .args(["run", "--quiet"]);
        process::run(&mut command)
            .with_context(|| format!("the README of {} does not hold", consumer.package))?;
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

fn readme_example(consumer: &Consumer) -> Result<String> {
    let path = workspace::root()
        .join("crates")
        .join(consumer.dir)
        .join("README.md");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    first_example(&text).with_context(|| format!("{} has no Rust example", path.display()))
}

/// The first block of Rust in a page, as a program: as rustdoc does it.
fn first_example(page: &str) -> Option<String> {
    let mut lines = page.lines();
    loop {
        let fence = lines.by_ref().find(|line| line.starts_with("```"))?;
        // A block without a language is Rust to rustdoc.
        if matches!(fence.trim(), "```") || fence.starts_with("```rust") {
            break;
        }
        lines.by_ref().find(|line| line.trim() == "```")?;
    }
    let code: Vec<_> = lines
        .take_while(|line| line.trim() != "```")
        // rustdoc hides these lines from readers, not from the compiler.
        .map(|line| {
            if line.trim() == "#" {
                ""
            } else {
                line.strip_prefix("# ").unwrap_or(line)
            }
        })
        .collect();
    let body = code.join("\n");
    if body.contains("fn main(") {
        return Some(body);
    }
    // An example that ends with `Ok::<(), E>(())` may use `?`.
    Some(if body.trim_end().ends_with("(())") {
        format!(
            "fn main() {{\n    fn example() -> Result<(), impl std::fmt::Debug> {{\n{body}\n    }}\n    \
             example().unwrap();\n}}\n"
        )
    } else {
        format!("fn main() {{\n{body}\n}}\n")
    })
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

    /// Lays out the project of one consumer.
    fn project(&self, consumer: &Consumer, example: &str) -> Result<PathBuf> {
        let root = workspace::root();
        let table = fs::read_to_string(root.join("Cargo.toml"))?;
        let dir = self.path.join(consumer.dir);
        fs::create_dir_all(dir.join("src"))?;
        fs::write(dir.join("src/main.rs"), example)?;
        // The versions that the workspace is tested with.
        fs::copy(root.join("Cargo.lock"), dir.join("Cargo.lock"))?;
        fs::write(dir.join("Cargo.toml"), manifest(consumer, &root, &table)?)?;
        Ok(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn manifest(consumer: &Consumer, root: &Path, table: &str) -> Result<String> {
    let path = root.join("crates").join(consumer.dir);
    let mut text = format!(
        "[package]\nname = \"consumer\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [dependencies]\n{} = {{ path = {:?}, default-features = false, features = {:?} }}\n",
        consumer.package, path, consumer.features
    );
    for name in consumer.also {
        let line = table
            .lines()
            .find(|line| line.starts_with(&format!("{name} = ")));
        let line = line.with_context(|| format!("the workspace does not declare {name}"))?;
        // Neighbours are named by paths within the tree.
        let crates = format!("path = \"{}/crates/", root.display());
        text.push_str(&line.replace("path = \"crates/", &crates));
        text.push('\n');
    }
    ensure!(path.is_dir(), "{} is not there", path.display());
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::first_example;

    #[test]
    fn the_first_rust_block_becomes_a_program() {
        let page =
            "# X\n```sh\nls\n```\n```rust\n# use a::B;\n#\nlet x = 1;\n```\n```rust\nno\n```\n";
        let program = first_example(page).expect("an example");
        assert_eq!(program, "fn main() {\nuse a::B;\n\nlet x = 1;\n}\n");
        assert_eq!(
            first_example("```rust,no_run\nfn main() {}\n```\n").expect("one"),
            "fn main() {}"
        );
        assert!(
            first_example("```rust\nf()?;\n# Ok::<(), E>(())\n```\n")
                .expect("one")
                .contains("example()")
        );
        assert_eq!(first_example("```sh\nls\n```\n"), None);
        assert_eq!(
            first_example("```sh\nls\n```\nText.\n```\n# fn main() {\nf();\n# }\n```\n"),
            Some("fn main() {\nf();\n}".into())
        );
    }
}
