//! What the operator says about GIDs: an index, allowed subnets, allowed interfaces.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use crate::{SettingError, Subnet};

/// Variables with an explicit index; the first that is set wins. `-1` and `auto` mean automatic.
const INDEX_VARIABLES: &[&str] = &["RERAIL_GID_INDEX", "MC_GID_INDEX", "NCCL_IB_GID_INDEX"];
const SUBNETS_VARIABLE: &str = "RERAIL_GID_SUBNETS";
const NETDEVS_VARIABLE: &str = "RERAIL_GID_NETDEVS";
const INDEX_RANGE: &str = "0..=65535, -1 or auto, or a list such as mlx5_0=3,mlx5_1=6";

/// The operator's choices for one process. The default leaves everything to the ranking.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GidPolicy {
    /// Explicit indexes.
    pub index: GidIndexes,
    /// Networks whose addresses may be used; empty for all.
    pub subnets: Vec<Subnet>,
    /// Interfaces whose addresses may be used, by exact name; empty for all.
    pub netdevs: Vec<String>,
}

impl GidPolicy {
    /// The policy of the environment: `RERAIL_GID_INDEX`, else `MC_GID_INDEX`, else
    /// `NCCL_IB_GID_INDEX`; `RERAIL_GID_SUBNETS` and `RERAIL_GID_NETDEVS`, lists joined by commas.
    ///
    /// # Errors
    ///
    /// A variable that is set and does not parse, the empty text included.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingError> {
        let mut policy = Self::default();
        for variable in INDEX_VARIABLES {
            if let Some(text) = lookup(variable) {
                policy.index = GidIndexes::parse(&text)
                    .ok_or_else(|| SettingError::new(*variable, &text, INDEX_RANGE))?;
                break;
            }
        }
        if let Some(text) = lookup(SUBNETS_VARIABLE) {
            policy.subnets = split(&text)
                .map(|part| part?.parse().ok())
                .collect::<Option<_>>()
                .ok_or_else(|| {
                    SettingError::new(
                        SUBNETS_VARIABLE,
                        &text,
                        "subnets joined by commas, such as 10.62.0.0/16",
                    )
                })?;
        }
        if let Some(text) = lookup(NETDEVS_VARIABLE) {
            policy.netdevs = split(&text)
                .map(|part| part.map(str::to_owned))
                .collect::<Option<_>>()
                .ok_or_else(|| {
                    SettingError::new(NETDEVS_VARIABLE, &text, "interface names joined by commas")
                })?;
        }
        Ok(policy)
    }
}

/// The parts of a comma list, trimmed; an empty part is `None`.
fn split(text: &str) -> impl Iterator<Item = Option<&str>> {
    text.split(',').map(|part| {
        let part = part.trim();
        (!part.is_empty()).then_some(part)
    })
}

/// An explicit index for every device, for some, or for none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GidIndexes {
    every: Option<u32>,
    by_device: BTreeMap<String, u32>,
}

impl GidIndexes {
    /// One index for every device.
    pub fn every(index: u32) -> Self {
        Self {
            every: Some(index),
            by_device: BTreeMap::new(),
        }
    }

    /// Reads `3`, `-1`, `auto`, or a list such as `mlx5_0=3,mlx5_1:2=6` where a name may carry a
    /// port. A device named twice, and a list in which a plain number is mixed, are `None`.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text == "-1" || text == "auto" {
            return Some(Self::default());
        }
        if !text.contains('=') {
            return parse_index(text).map(Self::every);
        }
        let mut by_device = BTreeMap::new();
        for part in split(text) {
            let (device, index) = part?.split_once('=')?;
            let device = device.trim();
            let taken = by_device.insert(device.to_owned(), parse_index(index.trim())?);
            if device.is_empty() || taken.is_some() {
                return None;
            }
        }
        Some(Self {
            every: None,
            by_device,
        })
    }

    /// The explicit index of a device's port: `<device>:<port>` wins over `<device>`.
    pub fn of(&self, device: &str, port: u32) -> Option<u32> {
        if self.by_device.is_empty() {
            return self.every;
        }
        self.by_device
            .get(&format!("{device}:{port}"))
            .or_else(|| self.by_device.get(device))
            .or(self.every.as_ref())
            .copied()
    }
}

fn parse_index(text: &str) -> Option<u32> {
    // A sign is no part of an index, though Rust's integers take one.
    let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    digits
        .then(|| text.parse::<u16>().ok().map(u32::from))
        .flatten()
}

/// In a file: a number, or a text in the form of [`GidIndexes::parse`].
impl<'de> Deserialize<'de> for GidIndexes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected an index (0..=65535) or a list such as \"mlx5_0=3\""
        )]
        enum Form {
            Number(u16),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(index) => Ok(Self::every(index.into())),
            Form::Text(text) => Self::parse(&text)
                .ok_or_else(|| serde::de::Error::custom(format!("{text:?} is not {INDEX_RANGE}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(variables: &[(&str, &str)]) -> Result<GidPolicy, SettingError> {
        GidPolicy::from_env(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, text)| (*text).to_owned())
        })
    }

    #[test]
    fn u12_lists_and_per_device_forms_are_accepted() {
        let indexes = GidIndexes::parse("mlx5_0=3, mlx5_1=6,mlx5_2:2=7").expect("a list");
        assert_eq!(indexes.of("mlx5_0", 1), Some(3));
        assert_eq!(indexes.of("mlx5_1", 1), Some(6));
        assert_eq!(indexes.of("mlx5_2", 1), None);
        assert_eq!(indexes.of("mlx5_2", 2), Some(7));
        let policy = policy(&[
            ("RERAIL_GID_SUBNETS", "10.62.0.0/16, fd00::/8"),
            ("RERAIL_GID_NETDEVS", "bond1,eth0"),
        ])
        .expect("a policy");
        assert_eq!(policy.subnets.len(), 2);
        assert_eq!(policy.netdevs, ["bond1", "eth0"]);
    }

    #[test]
    fn rerail_wins_over_mc_and_that_over_nccl() {
        let all = [
            ("NCCL_IB_GID_INDEX", "1"),
            ("MC_GID_INDEX", "2"),
            ("RERAIL_GID_INDEX", "3"),
        ];
        for (take, expected) in [(3, 3), (2, 2), (1, 1)] {
            let policy = policy(&all[..take]).expect("a policy");
            assert_eq!(policy.index.of("mlx5_0", 1), Some(expected));
        }
        let automatic = policy(&[("MC_GID_INDEX", "-1"), ("NCCL_IB_GID_INDEX", "3")]);
        assert_eq!(automatic.expect("a policy").index.of("mlx5_0", 1), None);
    }

    #[test]
    fn u10_a_value_that_does_not_parse_is_an_error_that_names_it() {
        for text in [
            "", "abc", "-2", "+3", "65536", "mlx5_0=", "=3", "a=1,a=2", "a=1,3", "a=1,",
        ] {
            let error = policy(&[("MC_GID_INDEX", text)])
                .expect_err(text)
                .to_string();
            assert!(
                error.contains("MC_GID_INDEX") && error.contains("0..=65535"),
                "{error}"
            );
        }
        assert!(policy(&[("RERAIL_GID_SUBNETS", "10.0.0.0")]).is_err());
        assert!(policy(&[("RERAIL_GID_NETDEVS", "a,,b")]).is_err());
    }
}
