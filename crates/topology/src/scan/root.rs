//! Reading small files below a root that stands for `/`. Nothing else in the crate touches the
//! system.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Dir, Mode, OFlags};

/// Longest attribute in bytes; the kernel's own limit is a page.
const ATTRIBUTE_BYTES_MAX: usize = 4096;
/// Most entries of one directory that are looked at.
const ENTRIES_MAX: usize = 65_536;

/// A directory that stands for `/`.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    /// Resolved, so that resolved paths below it begin with it.
    path: PathBuf,
}

impl Root {
    pub(crate) fn new(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.canonicalize()?,
        })
    }

    /// Whether it is `/` itself and no copy, so that the machine's libraries speak of it.
    pub(crate) fn is_this_machine(&self) -> bool {
        self.path == Path::new("/")
    }

    /// The file's own path.
    pub(crate) fn join(&self, below: impl AsRef<Path>) -> PathBuf {
        let below = below.as_ref();
        self.path.join(below.strip_prefix("/").unwrap_or(below))
    }

    /// An attribute's text, without the white space around it.
    pub(crate) fn read(&self, below: impl AsRef<Path>) -> io::Result<String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(self.join(below), flags, Mode::empty())?;
        read_attribute(&file)
    }

    /// Names in a directory, in ascending order of text; empty where it does not exist.
    pub(crate) fn list(&self, below: impl AsRef<Path>) -> io::Result<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY;
        let directory = match rustix::fs::open(self.join(below), flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        list_directory(&directory)
    }

    /// Where a path leads, as seen from the root; `None` where it leads out of it or nowhere.
    ///
    /// A link with an absolute target is followed below the root, as it would be with a root that
    /// is really `/`.
    pub(crate) fn resolve(&self, below: impl AsRef<Path>) -> Option<PathBuf> {
        let path = self.join(below);
        let path = match path.read_link() {
            Ok(target) if target.is_absolute() => self.join(target),
            _ => path,
        };
        let resolved = path.canonicalize().ok()?;
        let below = resolved.strip_prefix(&self.path).ok()?;
        Some(Path::new("/").join(below))
    }
}

/// A directory whose small files are read by name, without walking the whole path for each.
pub(crate) struct AttributeDir(OwnedFd);

impl AttributeDir {
    pub(crate) fn open(root: &Root, below: impl AsRef<Path>) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY;
        let directory = rustix::fs::open(root.join(below), flags, Mode::empty())?;
        Ok(Self(directory))
    }

    /// Numbers that name files, in ascending order.
    pub(crate) fn numbers(&self) -> io::Result<Vec<u32>> {
        let names = list_directory(&self.0)?;
        let mut numbers: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    pub(crate) fn read(&self, name: &str) -> io::Result<String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::openat(&self.0, name, flags, Mode::empty())?;
        read_attribute(&file)
    }
}

fn list_directory(directory: &OwnedFd) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)?.take(ENTRIES_MAX) {
        let entry = entry?;
        // Nothing in sysfs has a name that is not UTF-8; what has is none of ours.
        match entry.file_name().to_str() {
            Ok(".." | ".") | Err(_) => {}
            Ok(name) => names.push(name.to_owned()),
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Almost every attribute is shorter than this, so that one read does.
const ATTRIBUTE_BYTES_USUAL: usize = 256;

/// A read that does not fill its buffer has reached the end, in sysfs and in a regular file.
fn read_attribute(file: &OwnedFd) -> io::Result<String> {
    let mut start = [0_u8; ATTRIBUTE_BYTES_USUAL];
    let count = read_once(file, &mut start)?;
    if count < start.len() {
        return Ok(String::from_utf8_lossy(&start[..count]).trim().to_owned());
    }
    let mut bytes = start.to_vec();
    bytes.resize(ATTRIBUTE_BYTES_MAX, 0);
    let mut filled = count;
    while filled < bytes.len() {
        match read_once(file, &mut bytes[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(String::from_utf8_lossy(&bytes[..filled]).trim().to_owned())
}

fn read_once(file: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::io::retry_on_intr(|| {
        rustix::io::read(file, &mut *buffer)
    })?)
}

/// The PCI functions on a resolved sysfs path, from the host bridge (`pci0000:b2`) down.
pub(crate) fn pci_path(resolved: &Path) -> Vec<String> {
    let parts = resolved
        .components()
        .filter_map(|component| match component {
            Component::Normal(part) => part.to_str(),
            _ => None,
        });
    parts
        .skip_while(|part| !part.starts_with("pci"))
        .take_while(|part| part.starts_with("pci") || is_bdf(part))
        .map(str::to_owned)
        .collect()
}

/// `DOMAIN:BUS:DEVICE.FUNCTION`, such as `0000:bb:00.0`.
pub(crate) fn is_bdf(text: &str) -> bool {
    let hex = |part: &str| !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_hexdigit());
    let mut parts = text.split(':');
    let (Some(domain), Some(bus), Some(slot), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let slot = slot.split_once('.');
    hex(domain) && hex(bus) && slot.is_some_and(|(slot, function)| hex(slot) && hex(function))
}
