//! Checks of `vm` itself, from outside: what every other result in the guest rests on.

use std::process::{Command, Output};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::image::Image;

type Check = fn() -> Result<()>;

/// Boots twice, without the rig. The image is made first: what that tells on standard error is
/// no part of a command's.
pub(crate) fn self_check() -> Result<()> {
    Image::ready()?;
    let checks = [
        (
            "vm_passes_on_the_status_and_keeps_the_streams_apart",
            status_and_streams as Check,
        ),
        ("vm_ends_a_command_that_hangs_and_keeps_its_output", hang),
    ];
    for (name, check) in checks {
        let started = Instant::now();
        check().context(name)?;
        println!("ok     {:7.1} s  {name}", started.elapsed().as_secs_f64());
    }
    println!("{} passed, 0 failed", checks.len());
    Ok(())
}

fn status_and_streams() -> Result<()> {
    let script = r#"echo out; echo err >&2; echo "it's" "$1" > $RERAIL_OUT/self-check; exit 7"#;
    let file = crate::workspace::target().join("guest/out/self-check");
    let _ = std::fs::remove_file(&file);
    let output = vm(&["--no-rig", "--", "sh", "-c", script, "sh", "a  'b' $c"])?;
    let (stdout, stderr) = streams(&output);
    ensure!(
        output.status.code() == Some(7),
        "status {} instead of 7: {stderr}",
        output.status
    );
    ensure!(stdout == "out\n", "stdout is {stdout:?}");
    ensure!(stderr == "err\n", "stderr is {stderr:?}");
    let written = std::fs::read_to_string(file)?;
    ensure!(
        written == "it's a  'b' $c\n",
        "the result file holds {written:?}"
    );
    Ok(())
}

fn hang() -> Result<()> {
    // Deaf to TERM, and with a child that would outlive it.
    let script = "trap '' TERM; sleep 1000 & echo before; while :; do sleep 1; done";
    let output = vm(&["--no-rig", "--timeout", "2", "--", "sh", "-c", script])?;
    let (stdout, stderr) = streams(&output);
    ensure!(
        output.status.code() == Some(124),
        "status {} instead of 124",
        output.status
    );
    ensure!(stdout == "before\n", "stdout is {stdout:?}");
    ensure!(
        stderr.contains("ended at its limit of 2 s"),
        "stderr is {stderr:?}"
    );
    Ok(())
}

// Through /proc: cargo may have replaced the file that we were started from.
fn vm(arguments: &[&str]) -> Result<Output> {
    Ok(Command::new("/proc/self/exe")
        .arg("vm")
        .args(arguments)
        .output()?)
}

fn streams(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}
