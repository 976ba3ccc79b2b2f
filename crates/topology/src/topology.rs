//! The whole of it: what was found, what is used, and what is near what.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::rail::{DeviceFilter, Rail, rails};
use crate::{Matrix, Scan, SettingError, TopologyError};

const CUSTOM_VARIABLES: &[&str] = &["RERAIL_CUSTOM_TOPOLOGY", "MC_CUSTOM_TOPO_JSON"];

/// A matrix that the operator made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CustomMatrix {
    /// The text itself.
    Inline(String),
    /// A file.
    File(PathBuf),
}

/// What the operator decides. Explicit choices win over what is found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TopologyOptions {
    /// Devices and ports to use.
    pub devices: DeviceFilter,
    /// A matrix instead of the discovered one.
    pub custom: Option<CustomMatrix>,
    /// The text of `CUDA_VISIBLE_DEVICES`, if it is set: it decides which GPU is `cuda:0`.
    pub cuda_visible: Option<String>,
}

impl TopologyOptions {
    /// `RERAIL_DEVICES` (`MC_TE_FILTERS`), `RERAIL_CUSTOM_TOPOLOGY` (`MC_CUSTOM_TOPO_JSON`), each a
    /// file or the matrix itself (see [`CustomMatrix::parse`]), and `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    ///
    /// A variable that is set and cannot be used.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingError> {
        let mut custom = None;
        for variable in CUSTOM_VARIABLES {
            if let Some(text) = lookup(variable) {
                if text.trim().is_empty() {
                    let expected = "the name of a file, or a matrix {…}";
                    return Err(SettingError::new(*variable, &text, expected));
                }
                custom = Some(CustomMatrix::parse(&text));
                break;
            }
        }
        Ok(Self {
            devices: DeviceFilter::from_env(&lookup)?,
            custom,
            cuda_visible: lookup("CUDA_VISIBLE_DEVICES"),
        })
    }
}

impl CustomMatrix {
    /// What a setting says: the matrix itself if it begins with `{`, else the name of a file. A
    /// file whose name begins so can be given as `./{…`.
    pub fn parse(text: &str) -> Self {
        if text.trim_start().starts_with('{') {
            Self::Inline(text.to_owned())
        } else {
            Self::File(text.into())
        }
    }
}

/// Rails and matrix of a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topology {
    /// What was found.
    pub scan: Scan,
    /// What is used, in the order in which it is to be published.
    pub rails: Vec<Rail>,
    /// What is near what; names no rail that is not in `rails`.
    pub matrix: Matrix,
    /// What the operator should know, in words.
    pub warnings: Vec<String>,
}

impl Topology {
    /// Reads the machine below `root` and makes rails and matrix of it. Devices that the options'
    /// filter does not name are not opened.
    ///
    /// # Errors
    ///
    /// As [`Scan::read`] and [`new`](Self::new).
    pub fn read(root: &Path, options: &TopologyOptions) -> Result<Self, TopologyError> {
        Self::new(Scan::read_for(root, &options.devices)?, options)
    }

    /// Makes rails and matrix of what was found.
    ///
    /// # Errors
    ///
    /// Options that cannot be honoured: nothing falls back to discovery silently.
    pub fn new(scan: Scan, options: &TopologyOptions) -> Result<Self, TopologyError> {
        let (mut rails, warnings) = rails(&scan, &options.devices)?;
        if let Some(custom) = &options.custom
            && options.devices.is_empty()
        {
            name_rails(custom, &scan, &mut rails)?;
        }
        let mut topology = Self::with_rails(scan, rails, options)?;
        topology.warnings.extend(warnings);
        Ok(topology)
    }

    /// Makes the matrix of ports that are in use already, whatever was found of them. Which devices
    /// the options name does not count.
    ///
    /// # Errors
    ///
    /// A custom matrix that cannot be honoured.
    pub fn with_rails(
        scan: Scan,
        rails: Vec<Rail>,
        options: &TopologyOptions,
    ) -> Result<Self, TopologyError> {
        let mut warnings = scan.warnings.clone();
        let matrix = match &options.custom {
            None => Matrix::discover(&scan, &rails, options.cuda_visible.as_deref()),
            Some(custom) => {
                let (matrix, unused) = read_custom(custom, &scan, &rails)?;
                if !unused.is_empty() {
                    let unused = unused.join(", ");
                    warnings.push(format!(
                        "the custom topology names {unused}, not used for now"
                    ));
                }
                matrix
            }
        };
        Ok(Self {
            scan,
            rails,
            matrix,
            warnings,
        })
    }
}

/// A custom matrix, checked against what there is.
fn parse_custom(
    custom: &CustomMatrix,
    scan: &Scan,
    rails: &[Rail],
) -> Result<Matrix, TopologyError> {
    let (text, document) = match custom {
        CustomMatrix::Inline(text) => (text.clone(), "custom topology".to_owned()),
        CustomMatrix::File(path) => (crate::document::read(path)?, path.display().to_string()),
    };
    let matrix = Matrix::parse(&text, &document)?;
    let with_port = scan.nics.iter().flat_map(|nic| {
        let ports = nic.ports.iter();
        ports.map(|port| format!("{}:{}", nic.name, port.number))
    });
    let used = rails
        .iter()
        .map(|rail| format!("{}:{}", rail.device, rail.port));
    let with_port: Vec<_> = with_port.chain(used).collect();
    let mut known: BTreeSet<&str> = scan.nics.iter().map(|nic| nic.name.as_str()).collect();
    known.extend(rails.iter().map(|rail| rail.name.as_str()));
    known.extend(with_port.iter().map(String::as_str));
    matrix.check_names(&known, &text, &document)?;
    Ok(matrix)
}

/// Uses what a custom matrix names in place of the default set: a name that is only left out of
/// that is used, since it is named.
fn name_rails(
    custom: &CustomMatrix,
    scan: &Scan,
    chosen: &mut Vec<Rail>,
) -> Result<(), TopologyError> {
    let matrix = parse_custom(custom, scan, chosen)?;
    let mut all: Vec<String> = matrix.names().map(str::to_owned).collect();
    crate::matrix::sort_naturally(&mut all);
    if !all.is_empty() {
        let filter = DeviceFilter::parse("custom topology", &all.join(","))?;
        (*chosen, _) = rails(scan, &filter)?;
    }
    Ok(())
}

/// The matrix, and the names in it that exist but are not used: down, not openable, or filtered
/// out.
fn read_custom(
    custom: &CustomMatrix,
    scan: &Scan,
    chosen: &[Rail],
) -> Result<(Matrix, Vec<String>), TopologyError> {
    let mut matrix = parse_custom(custom, scan, chosen)?;
    let published = |name: &str| {
        let by_name = chosen.iter().find(|rail| rail.name == name);
        let with_port = |rail: &&Rail| format!("{}:{}", rail.device, rail.port) == name;
        let rail = by_name.or_else(|| chosen.iter().find(with_port));
        rail.map(|rail| rail.name.clone())
    };
    let unused = matrix.names().filter(|name| published(name).is_none());
    let unused = unused.map(str::to_owned).collect();
    matrix.rename(published);
    Ok((matrix, unused))
}
