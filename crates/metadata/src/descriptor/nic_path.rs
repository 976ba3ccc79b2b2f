//! NIC paths, by which the two ends of a connection name each other.

use std::fmt;
use std::str::FromStr;

use super::DocumentError;

/// `<server>@<device>`. Peers compare these texts literally, so there is one constructor:
/// [`nic_path`], or [`super::SegmentDescriptor::nic_path`] on top of it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NicPath {
    server: String,
    device: String,
}

/// The path of `device` at a server: `rdma_server_name` where it is set and not empty, else
/// `name` (reference 2.7).
pub fn nic_path(name: &str, rdma_server_name: Option<&str>, device: &str) -> NicPath {
    NicPath {
        server: nic_path_server_name(name, rdma_server_name).to_owned(),
        device: device.to_owned(),
    }
}

/// The part before the `@`.
pub(super) fn nic_path_server_name<'a>(
    name: &'a str,
    rdma_server_name: Option<&'a str>,
) -> &'a str {
    rdma_server_name
        .filter(|rdma_name| !rdma_name.is_empty())
        .unwrap_or(name)
}

impl NicPath {
    /// The server's name, `nicPathServerName`.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The device's name; `<device>:<port>` for a further port.
    pub fn device(&self) -> &str {
        &self.device
    }
}

impl fmt::Display for NicPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.server, self.device)
    }
}

impl FromStr for NicPath {
    type Err = DocumentError;

    /// Splits at the *first* `@`, as the C++ engine does.
    fn from_str(text: &str) -> Result<Self, DocumentError> {
        let error = |reason: &str| DocumentError::value("nic path", reason);
        let (server, device) = text
            .split_once('@')
            .ok_or_else(|| error("has no '@'; expected <server>@<device>"))?;
        if server.is_empty() || device.is_empty() {
            return Err(error("server and device must not be empty"));
        }
        Ok(Self {
            server: server.to_owned(),
            device: device.to_owned(),
        })
    }
}
