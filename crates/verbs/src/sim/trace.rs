//! What the fabric decided, as text.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// Lines of text, one a decision, each beginning with the time in nanoseconds.
///
/// The same seed and the same calls give the same lines, byte for byte: they hold no address of
/// this process, no clock and no hash order. The last lines are kept; the digest covers all.
#[derive(Debug)]
pub(super) struct Trace {
    lines: VecDeque<String>,
    lines_max: usize,
    digest: u64,
    count: u64,
}

impl Trace {
    /// A trace that keeps the last `lines_max` lines; with 0 it is off and costs nothing.
    pub(super) fn new(lines_max: usize) -> Self {
        Self {
            lines: VecDeque::new(),
            lines_max,
            digest: 0xcbf2_9ce4_8422_2325,
            count: 0,
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.lines_max > 0
    }

    pub(super) fn line(&mut self, now: Duration, what: fmt::Arguments<'_>) {
        if !self.is_on() {
            return;
        }
        let line = format!("{} {what}", now.as_nanos());
        // FNV-1a: only equality matters.
        for byte in line.bytes().chain([b'\n']) {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self.count += 1;
        if self.lines.len() == self.lines_max {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    /// A number that differs when any line since the beginning differs, in all likelihood.
    pub(super) fn digest(&self) -> u64 {
        self.digest ^ self.count
    }
}

/// Writes a line to a core's trace if that is on.
macro_rules! trace {
    ($core:expr, $($arg:tt)+) => {
        if $core.trace.is_on() {
            let now = $core.now;
            $core.trace.line(now, format_args!($($arg)+));
        }
    };
}
pub(super) use trace;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_the_digest_is_not() {
        let run = |last: u32| {
            let mut trace = Trace::new(2);
            for number in [1, 2, 3, last] {
                trace.line(Duration::from_nanos(5), format_args!("n={number}"));
            }
            (trace.text(), trace.digest())
        };
        assert_eq!(run(4).0, "5 n=3\n5 n=4\n");
        assert_eq!(run(4), run(4));
        assert_ne!(run(4).1, run(5).1);
    }
}
