//! Rules for the crates' manifests: what is the same for all is declared once, in the workspace.

use std::path::Path;

use super::Breach;

/// Checks a member's manifest. The workspace's own has none of this.
pub(super) fn check(file: &Path, text: &str) -> Vec<Breach> {
    if file == Path::new("Cargo.toml") {
        return Vec::new();
    }
    let mut breaches = Vec::new();
    let mut breach = |line, message: &str| {
        breaches.push(Breach {
            file: file.to_owned(),
            line,
            message: message.to_owned(),
        });
    };
    for key in [
        "version",
        "edition",
        "rust-version",
        "license",
        "repository",
    ] {
        if !text
            .lines()
            .any(|line| line == format!("{key}.workspace = true"))
        {
            breach(None, &format!("lacks `{key}.workspace = true`"));
        }
    }
    if !text.contains("[lints]\nworkspace = true\n") {
        breach(
            None,
            "does not take the workspace's lints: `[lints]`, `workspace = true`",
        );
    }
    let mut section = "";
    for (at, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            section = line;
        } else if section.ends_with("dependencies]")
            && !line.is_empty()
            && !line.starts_with('#')
            && !line.contains("workspace = true")
        {
            breach(
                Some(at + 1),
                "declare the dependency in the workspace and refer to it",
            );
        }
    }
    breaches
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::check;

    const GOOD: &str = "[package]\nversion.workspace = true\nedition.workspace = true\n\
        rust-version.workspace = true\nlicense.workspace = true\nrepository.workspace = true\n\n\
        [dependencies]\nserde.workspace = true\nbincode = { workspace = true, optional = true }\n\n\
        [lints]\nworkspace = true\n";

    #[test]
    fn what_the_workspace_declares_is_taken_from_it() {
        let file = Path::new("crates/x/Cargo.toml");
        assert_eq!(check(file, GOOD).len(), 0);
        assert_eq!(
            check(
                file,
                &GOOD.replace("serde.workspace = true", "serde = \"1\"")
            )
            .len(),
            1
        );
        assert_eq!(check(file, &GOOD.replace("[lints]", "[other]")).len(), 1);
        assert_eq!(
            check(file, &GOOD.replace("edition.workspace = true\n", "")).len(),
            1
        );
    }
}
