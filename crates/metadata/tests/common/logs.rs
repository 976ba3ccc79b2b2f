//! What this process logs, at the loudest.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("lock").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

static SINK: OnceLock<Sink> = OnceLock::new();

/// Starts to collect, the libraries' own words too. Once a process.
pub fn collect() {
    SINK.get_or_init(|| {
        let sink = Sink::default();
        let writer = sink.clone();
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .init();
        sink
    });
}

/// Panics if `secret` was logged, or nothing at all.
pub fn assert_without(secret: &str) {
    let sink = SINK.get().expect("collecting");
    let logged = String::from_utf8_lossy(&sink.0.lock().expect("lock")).into_owned();
    assert!(!logged.is_empty(), "nothing was logged");
    let line = logged.lines().find(|line| line.contains(secret));
    assert!(line.is_none(), "{line:?}");
}
