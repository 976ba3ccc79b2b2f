//! The C++ engine that interop is tested with: its Python wheel in a virtual environment.
//!
//! Outside the repository, in the user's cache, and never part of it. Pinned by version and hash
//! while the registry keeps that version, else the newest one, whose version is printed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

const PACKAGE: &str = "mooncake-transfer-engine-non-cuda";
const VERSION: &str = "0.3.13.post1";
/// The engine's wheel for CPython 3.11 on x86-64, which is what Debian 12 has, and what its HTTP
/// metadata server needs: packages, versions, hashes.
const REQUIREMENTS: &str = "\
mooncake-transfer-engine-non-cuda==0.3.13.post1 \
--hash=sha256:ca9f668a04ffe648b250fda28b97d0a7da149cb110dec5cf3d166a9e68afc940
aiohttp==3.14.5 \
--hash=sha256:50a195903119008fe9cc68710535eb37f556ffffd6a7759afe70a2c145587045
aiohappyeyeballs==2.7.1 \
--hash=sha256:9243213661e29250eb41368e5daa826fc017156c3b8a11440826b2e3ed376472
aiosignal==1.4.0 \
--hash=sha256:053243f8b92b990551949e63930a839ff0cf0b0ebbe0597b0f3fb19e1a0fe82e
attrs==26.1.0 \
--hash=sha256:c647aa4a12dfbad9333ca4e71fe62ddc36f4e63b2d260a37a8b83d2f043ac309
frozenlist==1.8.0 \
--hash=sha256:2552f44204b744fba866e573be4c1f9048d6a324dfe14475103fd51613eb1d1f
idna==3.20 \
--hash=sha256:ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c
multidict==7.2.1 \
--hash=sha256:3b7542fad2706595c1b1853b46f2c3c4ae5cc5a6252b7225f294d607a29e1bdf
propcache==0.5.4 \
--hash=sha256:6e9368e87a3efc285e559131092c5db643eb8e56de4ee42064d5baec22ef2bb5
typing_extensions==4.16.0 \
--hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
yarl==1.25.1 \
--hash=sha256:d5add7b4ca7afeea91d52e4d4e4db3b1fe9885b71f07054560d8c4296b7441a2
";
/// Part of the environment's name: change it when its content changes.
const RECIPE: u32 = 2;

/// The Python of an environment in which `mooncake.engine` can be imported. Made if not there.
pub(crate) fn python() -> Result<PathBuf> {
    let cache = cache_dir()?;
    let environment = cache.join(format!("cpp-engine-{VERSION}-{RECIPE}"));
    let python = environment.join("bin/python");
    if !python.exists() {
        fs::create_dir_all(&cache)?;
        // Made aside and renamed: an interrupted run leaves nothing that looks finished.
        let building = cache.join(format!("building-{}", std::process::id()));
        let _ = fs::remove_dir_all(&building);
        let made = install(&building).and_then(|()| match fs::rename(&building, &environment) {
            Err(_) if python.exists() => Ok(()),
            renamed => renamed.context("cannot put the C++ engine's environment in place"),
        });
        let _ = fs::remove_dir_all(&building);
        made.context("cannot install the C++ engine")?;
    }
    Ok(python)
}

fn cache_dir() -> Result<PathBuf> {
    let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) => Path::new(&home).join(".cache"),
        _ => anyhow::bail!("neither XDG_CACHE_HOME nor HOME is set"),
    };
    Ok(cache.join("rerail"))
}

fn install(environment: &Path) -> Result<()> {
    // The distribution's own Python: the wheel is for its version, another may be first in PATH.
    process::output(
        Command::new("/usr/bin/python3")
            .args(["-m", "venv"])
            .arg(environment),
    )?;
    let python = environment.join("bin/python");
    let pip = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.args(["-m", "pip", "install", "--quiet", "--only-binary=:all:"]);
        process::output(command.args(arguments))
    };
    eprintln!(
        "setup: installing {PACKAGE} {VERSION} below {}",
        environment.display()
    );
    let requirements = environment.join("requirements.txt");
    fs::write(&requirements, REQUIREMENTS)?;
    let pinned = pip(&[
        "--no-deps",
        "--require-hashes",
        "-r",
        &requirements.to_string_lossy(),
    ]);
    if let Err(error) = pinned {
        eprintln!("setup: the pinned C++ engine cannot be had: {error:#}");
        pip(&["--no-deps", PACKAGE])?;
        pip(&["aiohttp"])?;
        let shown = process::output(Command::new(&python).args(["-m", "pip", "show", PACKAGE]))?;
        let version = shown.lines().find(|line| line.starts_with("Version: "));
        eprintln!(
            "setup: taking the newest instead: {}",
            version.unwrap_or("unknown")
        );
    }
    let imports = "import mooncake.engine, mooncake.http_metadata_server";
    process::output(Command::new(&python).args(["-c", imports]))?;
    Ok(())
}
