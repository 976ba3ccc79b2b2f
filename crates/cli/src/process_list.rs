//! What every user of the machine can read: the arguments of a process.
//!
//! Deliberately not here: hiding it. A program cannot take its arguments back before somebody has
//! seen them; it can only say so.

use rerail_metadata::StoreUrl;

/// Warns of a store's password among the arguments.
pub(crate) fn warn_of_secrets(arguments: impl Iterator<Item = String>) {
    if has_secret(arguments) {
        tracing::warn!(
            "the password in the store's URL can be read in the process list; give it by a variable \
             or a file instead: `rerail metadata --help` lists them"
        );
    }
}

fn has_secret(arguments: impl Iterator<Item = String>) -> bool {
    arguments.into_iter().any(|argument| {
        // `--metadata URL` and `--metadata=URL`.
        let url = argument.strip_prefix("--metadata=").unwrap_or(&argument);
        url.contains("://") && StoreUrl::parse(url).is_ok_and(|url| url.has_secret())
    })
}

#[cfg(test)]
mod tests {
    use super::has_secret;

    #[test]
    fn passwords_in_urls_are_found_and_nothing_else() {
        let has = |argument: &str| has_secret(std::iter::once(argument.to_owned()));
        assert!(has("redis://:s3cret@h:1/3"));
        assert!(has("--metadata=etcd://u:s3cret@h:1"));
        assert!(has("http://u:s3cret@h/metadata"));
        for harmless in [
            "redis://h:1",
            "redis://u@h:1",
            "--metadata",
            "u:p@h",
            "mooncake/ram/a",
        ] {
            assert!(!has(harmless), "{harmless}");
        }
    }
}
