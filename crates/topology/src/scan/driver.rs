//! What the driver's own library says of GPUs: which of them this process may use, in which order,
//! and their names. Only NVIDIA's is asked, with feature `nvml`; it is loaded at run time, by a
//! crate that is kept well, and its absence is no fault.
//!
//! Deliberately not here: loads, temperatures, NVLink.

use super::Gpu;

/// One GPU of the library's list.
#[cfg(any(feature = "nvml", test))]
struct Listed {
    /// In the library's form, such as `00000000:BC:00.0`.
    bus_id: String,
    model: Option<String>,
    uuid: Option<String>,
}

/// Adds what the library says to what `sysfs` shows.
#[cfg(feature = "nvml")]
pub(super) fn ask(gpus: &mut [Gpu], warnings: &mut Vec<String>) {
    // Nothing is loaded where there is nothing to ask about.
    if !gpus
        .iter()
        .any(|gpu| gpu.vendor == super::GpuVendor::Nvidia)
    {
        return;
    }
    match nvml::list(warnings) {
        Ok(Some(listed)) => merge(gpus, &listed, warnings),
        Ok(None) => tracing::debug!("no NVML: GPUs are numbered by PCI address"),
        Err(error) => warnings.push(format!(
            "NVML cannot be asked ({error}): GPUs are numbered by PCI address"
        )),
    }
}

#[cfg(not(feature = "nvml"))]
pub(super) fn ask(_gpus: &mut [Gpu], _warnings: &mut Vec<String>) {}

#[cfg(any(feature = "nvml", test))]
fn merge(gpus: &mut [Gpu], listed: &[Listed], warnings: &mut Vec<String>) {
    for (index, entry) in (0..).zip(listed) {
        let address = normal(&entry.bus_id);
        let gpu = gpus
            .iter_mut()
            .find(|gpu| Some(gpu.pci.bdf()) == address.as_deref());
        match gpu {
            Some(gpu) => {
                gpu.driver_index = Some(index);
                gpu.model = entry.model.clone().or_else(|| gpu.model.take());
                gpu.uuid = entry.uuid.clone().or_else(|| gpu.uuid.take());
            }
            None => warnings.push(format!(
                "NVML lists a GPU at {}, which sysfs does not show: it has no location",
                entry.bus_id
            )),
        }
    }
}

/// An address as `sysfs` writes it, such as `0000:bc:00.0`.
#[cfg(any(feature = "nvml", test))]
fn normal(bus_id: &str) -> Option<String> {
    let (domain, rest) = bus_id.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{domain:04x}:{}", rest.to_ascii_lowercase()))
}

#[cfg(feature = "nvml")]
mod nvml {
    use nvml_wrapper::Nvml;
    use nvml_wrapper::error::NvmlError;

    use super::Listed;

    /// The name that the driver installs; the one without a number comes with development files.
    const LIBRARY: &str = "libnvidia-ml.so.1";

    /// What NVML lists for this process, in its order; `None` where there is no NVML, or no driver.
    /// A GPU that cannot be asked hides no other.
    pub(super) fn list(warnings: &mut Vec<String>) -> Result<Option<Vec<Listed>>, NvmlError> {
        let nvml = match Nvml::builder().lib_path(LIBRARY.as_ref()).init() {
            Ok(nvml) => nvml,
            Err(
                NvmlError::LibloadingError(_)
                | NvmlError::LibraryNotFound
                | NvmlError::DriverNotLoaded,
            ) => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut listed = Vec::new();
        for index in 0..nvml.device_count()? {
            let device = nvml.device_by_index(index);
            match device.and_then(|device| Ok((device.pci_info()?.bus_id, device))) {
                Ok((bus_id, device)) => listed.push(Listed {
                    bus_id,
                    model: device.name().ok(),
                    uuid: device.uuid().ok(),
                }),
                Err(error) => warnings.push(format!("GPU {index} of NVML's is left out: {error}")),
            }
        }
        Ok(Some(listed))
    }

    #[cfg(test)]
    mod tests {
        #[test]
        fn a_machine_without_the_library_is_no_fault() {
            let there = std::path::Path::new("/proc/driver/nvidia/version").exists();
            match super::list(&mut Vec::new()) {
                Ok(listed) => assert!(there || listed.is_none()),
                Err(error) => assert!(there, "{error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PciPath;
    use crate::scan::GpuVendor;

    fn gpu(bdf: &str) -> Gpu {
        let parts = vec!["pci0000:00".to_owned(), bdf.to_owned()];
        Gpu {
            pci: PciPath::new(parts).expect("a path"),
            vendor: GpuVendor::Nvidia,
            numa_node: None,
            model: Some("from proc".to_owned()),
            uuid: None,
            driver_index: None,
        }
    }

    fn entry(bus_id: &str, model: Option<&str>, uuid: &str) -> Listed {
        Listed {
            bus_id: bus_id.to_owned(),
            model: model.map(str::to_owned),
            uuid: Some(uuid.to_owned()),
        }
    }

    fn locations(gpus: &[Gpu], visible: Option<&str>) -> Vec<(String, String)> {
        let numbered = crate::matrix::numbered(gpus, visible).into_iter();
        numbered
            .map(|(location, gpu)| (location, gpu.pci.bdf().to_owned()))
            .collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = expected.iter();
        owned
            .map(|(location, bdf)| ((*location).to_owned(), (*bdf).to_owned()))
            .collect()
    }

    #[test]
    fn the_librarys_list_says_which_gpus_count_and_in_which_order() {
        let mut gpus = [
            gpu("0000:1a:00.0"),
            gpu("0000:bc:00.0"),
            gpu("0001:0a:00.0"),
        ];
        let all = locations(&gpus, None);
        assert_eq!(all.len(), 3, "without the library, all by address");
        assert_eq!(all[2], ("cuda:2".to_owned(), "0001:0a:00.0".to_owned()));
        let listed = [
            entry("00000001:0A:00.0", Some("H100"), "GPU-aa1"),
            entry("00000000:1A:00.0", None, "GPU-bb2"),
            entry("00000000:FF:00.0", None, "GPU-cc3"),
            entry("garbage", None, "GPU-dd4"),
        ];
        let mut warnings = Vec::new();
        merge(&mut gpus, &listed, &mut warnings);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].contains("FF:00.0") && warnings[1].contains("garbage"));
        assert_eq!(
            locations(&gpus, None),
            pairs(&[("cuda:0", "0001:0a:00.0"), ("cuda:1", "0000:1a:00.0")]),
            "a GPU that this process may not use has no number"
        );
        assert_eq!(gpus[2].model.as_deref(), Some("H100"));
        assert_eq!(gpus[0].model.as_deref(), Some("from proc"));
        // `CUDA_VISIBLE_DEVICES` counts within that list.
        for (visible, expected) in [
            ("1", &[("cuda:0", "0000:1a:00.0")][..]),
            (
                "1,0",
                &[("cuda:0", "0000:1a:00.0"), ("cuda:1", "0001:0a:00.0")],
            ),
            ("GPU-bb", &[("cuda:0", "0000:1a:00.0")]),
            ("0,2,1", &[("cuda:0", "0001:0a:00.0")]),
            ("GPU-zz", &[]),
            ("", &[]),
        ] {
            assert_eq!(
                locations(&gpus, Some(visible)),
                pairs(expected),
                "{visible}"
            );
        }
    }
}
