//! How a failure reaches the user: what failed, its causes, and what to do about it.
//!
//! Deliberately not here: exit statuses other than "failed"; a command that has one returns it.

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

/// What failed in the user's words, with what the user can do about it.
///
/// It is a context of an [`anyhow::Error`], so that causes stay below it.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    remedy: String,
}

impl Failure {
    /// `what` failed; `remedy` says what to do, as an imperative without a full stop.
    pub(crate) fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            remedy: remedy.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Failure {}

/// Adds what failed and what to do to an error.
pub(crate) trait ResultExt<T> {
    /// See [`Failure::new`].
    fn or_fail(self, what: impl Into<String>, remedy: impl Into<String>) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> ResultExt<T> for Result<T, E> {
    fn or_fail(self, what: impl Into<String>, remedy: impl Into<String>) -> anyhow::Result<T> {
        self.map_err(|error| error.into().context(Failure::new(what, remedy)))
    }
}

/// Prints the error with its causes and the remedy to stderr, and gives the exit status.
///
/// An output whose reader has gone (`rerail … | head`) is not a failure of the program.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if is_closed_output(error) {
        return ExitCode::SUCCESS;
    }
    let mut text = format!("rerail: {error}\n");
    // Some libraries name the cause in their own message already.
    let mut said = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            text.push_str(&format!("  because: {cause}\n"));
            said.push_str(&cause);
        }
    }
    if let Some(failure) = error.downcast_ref::<Failure>() {
        text.push_str(&format!("  what to do: {}\n", failure.remedy));
    }
    // With stderr closed there is nobody to tell.
    let _ = io::stderr().write_all(text.as_bytes());
    ExitCode::FAILURE
}

/// Only a bare error is about our own output: a pipe that broke elsewhere has a context.
fn is_closed_output(error: &anyhow::Error) -> bool {
    error
        .chain()
        .next()
        .and_then(|outermost| outermost.downcast_ref::<io::Error>())
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_its_cause_and_its_remedy() {
        let cause: Result<(), _> = Err(io::Error::other("the cause"));
        let error = cause.or_fail("cannot", "do so").expect_err("an error");
        assert_eq!(error.to_string(), "cannot");
        assert_eq!(
            error.chain().last().expect("a cause").to_string(),
            "the cause"
        );
        assert_eq!(
            error.downcast_ref::<Failure>().expect("a failure").remedy,
            "do so"
        );
    }

    #[test]
    fn a_reader_that_has_gone_is_no_failure() {
        let gone: anyhow::Error = io::Error::from(io::ErrorKind::BrokenPipe).into();
        assert!(is_closed_output(&gone));
        let peer: anyhow::Error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe))
            .context(Failure::new("the store hung up", "start it"));
        assert!(!is_closed_output(&peer));
    }
}
