//! Rules for Rust sources.

use std::path::Path;

use super::Breach;

/// The longest file that a newcomer still reads.
const LINES_MAX: usize = 800;
/// The width of comments; rustfmt minds the code.
const COLUMNS_MAX: usize = 100;
/// Below these paths `unsafe` is allowed: the verbs themselves and the bindings for other
/// languages.
const MAY_BE_UNSAFE: &[&str] = &["crates/verbs", "crates/capi", "bindings"];
/// Only here the raw bindings may be named; everything else sees safe types.
const MAY_NAME_RDMA_SYS: &str = "crates/verbs/src/ibv/ffi";
/// Macros and attributes that mean "not done".
const UNFINISHED: &[&str] = &["todo!", "unimplemented!", "dbg!"];
const HIDING: &[&str] = &["#[ignore", "allow(dead_code)", "allow(unused)"];

pub(super) fn check(file: &Path, text: &str) -> Vec<Breach> {
    let mut breaches = Vec::new();
    let mut breach = |line, message: String| {
        breaches.push(Breach {
            file: file.to_owned(),
            line,
            message,
        });
    };
    let lines = text.lines().count();
    if lines > LINES_MAX {
        breach(
            None,
            format!("{lines} lines; at most {LINES_MAX}: split it by type or by subject"),
        );
    }
    // A file of tests is explained by the module that it tests, a snippet that must not compile by
    // the test that tries it.
    let explained = file.ends_with("tests.rs") || file.iter().any(|part| part == "compile_fail");
    if !has_head(text) && !explained {
        breach(
            None,
            "starts with no `//!` that says what it is and what is not in it".to_owned(),
        );
    }
    if is_library_root(file) && !may_be_unsafe(file) && !text.contains("#![forbid(unsafe_code)]") {
        breach(
            None,
            "a library crate without `#![forbid(unsafe_code)]`".to_owned(),
        );
    }
    for (at, line) in text.lines().enumerate() {
        let columns = line.chars().count();
        let comment = line.trim_start();
        // A row of a table cannot be broken.
        let table = comment.trim_start_matches(['/', '!', ' ']).starts_with('|');
        if comment.starts_with("//") && !table && columns > COLUMNS_MAX {
            breach(
                Some(at + 1),
                format!("a comment {columns} columns wide; {COLUMNS_MAX} at most"),
            );
        }
    }
    let bare = without_comments_and_strings(text);
    for (at, line) in bare.lines().enumerate() {
        let mut found = |what: &str, why: &str| breach(Some(at + 1), format!("`{what}`: {why}"));
        if has_word(line, "unsafe") && !may_be_unsafe(file) {
            found(
                "unsafe",
                "only crates/verbs and the bindings may; use its safe API",
            );
        }
        if has_word(line, "rdma_sys") && !file.starts_with(MAY_NAME_RDMA_SYS) && !is_ffi(file) {
            found("rdma_sys", "only verbs::ibv::ffi may name the raw bindings");
        }
        for name in UNFINISHED {
            if has_word(line, name) {
                found(name, "unfinished; leave it out or finish it");
            }
        }
        for attribute in HIDING {
            if line.contains(attribute) {
                found(
                    attribute,
                    "hides what does not work or is not used; mend or remove that",
                );
            }
        }
    }
    breaches
}

fn is_ffi(file: &Path) -> bool {
    file == Path::new(&format!("{MAY_NAME_RDMA_SYS}.rs"))
}

fn may_be_unsafe(file: &Path) -> bool {
    MAY_BE_UNSAFE
        .iter()
        .any(|allowed| file.starts_with(allowed))
}

/// `crates/NAME/src/lib.rs`.
fn is_library_root(file: &Path) -> bool {
    file.starts_with("crates") && file.ends_with("src/lib.rs")
}

/// Whether the first thing in the file is its head. Attributes for the whole file may come before.
fn has_head(text: &str) -> bool {
    let first = text
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with("#!["));
    first.is_some_and(|line| line.starts_with("//!"))
        // The head of a crate may be its README.
        || text.contains("doc = include_str!(")
}

/// Whether `word` stands in `line` with no identifier character just before or after it.
fn has_word(line: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(part) && (word.ends_with('!') || !after.is_some_and(part))
    })
}

/// `text` with comments and the contents of string and character literals blanked out; the lines
/// stay where they are.
fn without_comments_and_strings(text: &str) -> String {
    let mut bare = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = skipped_length(rest, bare.chars().next_back());
        let taken = if skipped == 0 {
            first.len_utf8()
        } else {
            skipped
        };
        let (piece, after) = rest.split_at(taken);
        if skipped == 0 {
            bare.push_str(piece);
        } else {
            bare.extend(piece.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        }
        rest = after;
    }
    bare
}

/// How many bytes at the start of `rest` are a comment or a literal; 0 if it is code.
fn skipped_length(rest: &str, before: Option<char>) -> usize {
    let to = |end: Option<usize>| end.unwrap_or(rest.len());
    if rest.starts_with("//") {
        return to(rest.find('\n'));
    }
    if rest.starts_with("/*") {
        return block_comment_length(rest);
    }
    if rest.starts_with('"') {
        return quoted_length(rest, '"');
    }
    // A prefix (r, br, cr) belongs to a raw string only if it starts a word.
    if !before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
        let raw = rest.trim_start_matches(['b', 'c']);
        if let Some(raw) = raw.strip_prefix('r')
            && rest.len() - raw.len() <= 2
        {
            let hashes = raw.len() - raw.trim_start_matches('#').len();
            if raw[hashes..].starts_with('"') {
                let end = format!("\"{}", "#".repeat(hashes));
                let opened = rest.len() - raw.len() + hashes + 1;
                return to(rest[opened..].find(&end).map(|at| opened + at + end.len()));
            }
        }
    }
    // 'x' and '\n' are characters, 'x without the closing quote is a lifetime.
    if let Some(inside) = rest.strip_prefix('\'') {
        if inside.starts_with('\\') {
            return quoted_length(rest, '\'');
        }
        if let Some(character) = inside.chars().next()
            && inside[character.len_utf8()..].starts_with('\'')
        {
            return character.len_utf8() + 2;
        }
    }
    0
}

/// The length of a literal that starts with `quote` and knows backslashes.
fn quoted_length(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// The length of a block comment; they nest.
fn block_comment_length(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        let here = &rest[at..];
        if here.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if here.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += here.chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{LINES_MAX, check, without_comments_and_strings};

    fn messages(file: &str, text: &str) -> Vec<String> {
        check(Path::new(file), text)
            .into_iter()
            .map(|breach| breach.message)
            .collect()
    }

    #[test]
    fn comments_and_literals_are_no_code() {
        let bare = without_comments_and_strings(
            "a /* x /* y */ z */ b // c\n\"d \\\" e\" f r#\"g \" h\"# 'i' '\\'' &'life j\n",
        );
        let words: Vec<_> = bare.split_whitespace().collect();
        assert_eq!(words, ["a", "b", "f", "&'life", "j"]);
        assert_eq!(bare.lines().count(), 2);
    }

    #[test]
    fn unsafe_is_found_in_code_and_only_there() {
        let unsafe_block = "//! Head.\nfn f() { unsafe { g() } }\n";
        assert_eq!(messages("crates/engine/src/f.rs", unsafe_block).len(), 1);
        assert_eq!(messages("crates/verbs/src/f.rs", unsafe_block).len(), 0);
        let mentioned =
            "//! Head: no unsafe.\n#![forbid(unsafe_code)]\nconst A: &str = \"unsafe\";\n";
        assert_eq!(messages("crates/engine/src/f.rs", mentioned).len(), 0);
    }

    #[test]
    fn unfinished_code_is_found() {
        for line in [
            "todo!()",
            "std::unimplemented!(\"x\")",
            "dbg!(1)",
            "#[ignore = \"slow\"]",
        ] {
            let text = format!("//! Head.\n{line}\n");
            assert_eq!(messages("tests/src/f.rs", &text).len(), 1, "{line}");
        }
        assert_eq!(
            messages("tests/src/f.rs", "//! Head.\nmy_todo!();\n").len(),
            0
        );
    }

    #[test]
    fn long_files_wide_comments_and_missing_heads_are_found() {
        let long = format!("//! Head.\n{}", "fn f();\n".repeat(LINES_MAX));
        assert_eq!(messages("tests/src/f.rs", &long).len(), 1);
        let wide = format!("//! Head.\n// {}\n", "x".repeat(100));
        assert_eq!(messages("tests/src/f.rs", &wide).len(), 1);
        assert_eq!(messages("tests/src/f.rs", "fn f() {}\n").len(), 1);
    }

    #[test]
    fn a_library_crate_must_forbid_unsafe_code() {
        assert_eq!(messages("crates/engine/src/lib.rs", "//! Head.\n").len(), 1);
        assert_eq!(messages("crates/verbs/src/lib.rs", "//! Head.\n").len(), 0);
    }

    #[test]
    fn the_raw_bindings_are_named_in_one_module_only() {
        let text = "//! Head.\nuse rdma_sys::ibv_pd;\n";
        assert_eq!(messages("crates/verbs/src/ibv/ffi.rs", text).len(), 0);
        assert_eq!(messages("crates/verbs/src/ibv/ffi/shims.rs", text).len(), 0);
        assert_eq!(messages("crates/verbs/src/ibv/context.rs", text).len(), 1);
    }
}
