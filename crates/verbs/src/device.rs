//! Devices that are not open yet.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend;
use crate::context::Context;
use crate::{VerbsError, fork};

/// How long [`Device::open`] waits for the device.
pub const OPEN_LIMIT: Duration = Duration::from_secs(60);

/// An RDMA device (`struct ibv_device`), as a list gave it. It may have gone since.
#[derive(Clone, Debug)]
pub struct Device {
    name: Arc<str>,
    node_guid: u64,
    backend: backend::Device,
}

impl Device {
    #[cfg(any(feature = "ibv", feature = "sim"))]
    pub(crate) fn new(name: Arc<str>, node_guid: u64, backend: backend::Device) -> Self {
        Self {
            name,
            node_guid,
            backend,
        }
    }

    #[cfg(all(test, feature = "ibv"))]
    pub(crate) fn real(&self) -> Option<&crate::ibv::Device> {
        match &self.backend {
            backend::Device::Ibv(device) => Some(device),
            #[cfg(feature = "sim")]
            backend::Device::Sim(_) => None,
        }
    }

    /// Name of the device, such as `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// GUID of the node in host byte order.
    pub fn node_guid(&self) -> u64 {
        self.node_guid
    }

    /// The devices of the machine as they are now: one that was pulled out and put back has to be
    /// found there again, by its name.
    ///
    /// # Errors
    ///
    /// The list cannot be read.
    pub fn relist(&self) -> Result<DeviceList, VerbsError> {
        fork::check()?;
        self.backend.relist()
    }

    /// Opens the device (`ibv_open_device`) on a new [control thread](crate::ControlThread), and
    /// waits for it at most [`OPEN_LIMIT`].
    pub fn open(&self) -> Result<Context, VerbsError> {
        self.open_within(OPEN_LIMIT)
    }

    /// Like [`open`](Self::open) with a limit of one's own. A device that opens too late is closed
    /// again by the thread that waited for it.
    pub fn open_within(&self, limit: Duration) -> Result<Context, VerbsError> {
        fork::check()?;
        Context::open(&self.name, &self.backend, limit, |_| ())
    }

    /// Like [`open`](Self::open), and shows the control thread to `begins` before the device is
    /// opened on it: where that hangs, the thread tells when it is over.
    pub fn open_shown(
        &self,
        begins: impl FnOnce(&crate::ControlThread),
    ) -> Result<Context, VerbsError> {
        fork::check()?;
        Context::open(&self.name, &self.backend, OPEN_LIMIT, begins)
    }
}

/// The devices of this machine, and why there are none if there are none.
#[derive(Clone, Debug, Default)]
pub struct DeviceList {
    devices: Vec<Device>,
    reason: Option<String>,
}

impl DeviceList {
    /// A list of devices.
    #[cfg(any(feature = "ibv", feature = "sim"))]
    pub(crate) fn new(devices: Vec<Device>, reason: Option<String>) -> Self {
        Self { devices, reason }
    }

    /// The devices, in the order of the backend.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Option<&Device> {
        self.devices.iter().find(|device| device.name() == name)
    }

    /// Why the list is empty, in words.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }
}

impl IntoIterator for DeviceList {
    type Item = Device;
    type IntoIter = std::vec::IntoIter<Device>;

    fn into_iter(self) -> Self::IntoIter {
        self.devices.into_iter()
    }
}

impl fmt::Display for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.devices.is_empty() {
            return write!(f, "no devices: {}", self.reason().unwrap_or("none found"));
        }
        for (index, device) in self.devices.iter().enumerate() {
            let separator = if index == 0 { "" } else { " " };
            write!(f, "{separator}{}", device.name())?;
        }
        Ok(())
    }
}
