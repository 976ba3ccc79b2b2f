//! What an administrator does to a store, without tools of the stores' own.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

/// Longest time for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);

/// Asks etcd's JSON gateway, and waits until it can answer.
///
/// # Errors
/// If it refuses, or cannot answer for long.
pub fn ask_etcd(address: &str, path: &str, body: &Value) -> Result<Value> {
    let body = body.to_string();
    let request = format!(
        "POST {path} HTTP/1.0\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let begun = Instant::now();
    loop {
        let said = exchange(address, &request, |_| false)?;
        let (head, answer) = said.split_once("\r\n\r\n").unwrap_or((&said, ""));
        if head.starts_with("HTTP/1.0 200") || head.starts_with("HTTP/1.1 200") {
            return Ok(serde_json::from_str(answer)?);
        }
        // A member that has just started has no leader yet.
        ensure!(begun.elapsed() < ANSWER_WITHIN, "{path}: {said}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Has Redis carry out a command, as typed.
///
/// # Errors
/// If it refuses.
pub fn tell_redis(address: &str, command: &str) -> Result<()> {
    let said = exchange(address, &format!("{command}\r\n"), |said| {
        said.ends_with("\r\n")
    })?;
    ensure!(!said.starts_with('-'), "{command}: {said}");
    Ok(())
}

/// Sends a text and reads until the other side closes, or `enough` says so.
fn exchange(address: &str, request: &str, enough: impl Fn(&str) -> bool) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.write_all(request.as_bytes())?;
    let (mut said, mut buffer) = (String::new(), [0; 4096]);
    while !enough(&said) {
        match stream.read(&mut buffer)? {
            0 => break,
            count => said += &String::from_utf8_lossy(&buffer[..count]),
        }
    }
    Ok(said)
}
