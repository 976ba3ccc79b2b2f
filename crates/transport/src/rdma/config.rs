//! Settings of the RDMA transport.

use std::time::Duration;

use rerail_topology::gid::GidPolicy;
use rerail_verbs::Mtu;

use super::endpoint::Limits;
use super::slice::Slicing;
use crate::TransportError;
use crate::settings::Settings;

/// Settings of the RDMA transport. Names of variables are given without their prefix `RERAIL_` or
/// `MC_`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RdmaConfig {
    /// Queue pairs of an endpoint, 1..=255 (`NUM_QP_PER_EP`, 2). Must be equal at both ends.
    pub qp_per_endpoint: u32,
    /// Work requests in flight on a queue pair (`MAX_WR`, 256), cut to the device's limit.
    pub send_wr_max: u32,
    /// Entries of a NIC's completion queue (`MAX_CQE_PER_CTX`, 4096), cut to the device's limit.
    pub cqe_max: u32,
    /// Endpoints of a NIC (`MAX_EP_PER_CTX`, 65535), cut to what the device's queue pairs allow.
    pub endpoints_max: u32,
    /// Where requests are cut (`SLICE_SIZE`, 65536; `FRAGMENT_RATIO`, 16384 bytes without it).
    pub slicing: Slicing,
    /// Bytes in flight on an endpoint (`WINDOW_BYTES`, 2 MiB). A slice may exceed it alone.
    pub window_bytes: u64,
    /// Upper bound of the path MTU (`MTU`, 4096).
    pub mtu_max: Mtu,
    /// Which GIDs may be used (`GID_INDEX`, `GID_SUBNETS`, `GID_NETDEVS`).
    pub gids: GidPolicy,
    /// Index in the P_Key table (`PKEY_INDEX`, 0).
    pub pkey_index: u16,
    /// IP traffic class (`IB_TC`, 0).
    pub traffic_class: u8,
    /// InfiniBand service level (`IB_SL`, 0).
    pub service_level: u8,
    /// Code of the acknowledgement timeout (`QP_TIMEOUT`, 14, which is 67 ms).
    pub timeout: u8,
    /// Retransmissions, 0..=6 (`QP_RETRY_CNT`, 6). Not 7, which soft-RoCE takes as "for ever".
    pub retry_cnt: u8,
    /// Hops that a packet may take (`HOP_LIMIT`, 64).
    pub hop_limit: u8,
    /// Largest region that is registered at once (`MAX_MR_SIZE`), cut to the device's limit.
    pub mr_bytes_max: u64,
    /// Time limit of a transfer that has none of its own (`TRANSFER_TIMEOUT`, 30 s).
    pub transfer_timeout: Duration,
    /// How long nothing may complete, besides the time that the bytes take
    /// (`PROGRESS_TIMEOUT_MS`, 500).
    pub progress_timeout: Duration,
    /// Time limits of connections.
    pub limits: Limits,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            qp_per_endpoint: 2,
            send_wr_max: 256,
            cqe_max: 4096,
            endpoints_max: 65_535,
            slicing: Slicing {
                slice_bytes: 65_536,
                fragment_bytes: 16_384,
            },
            window_bytes: 2 << 20,
            mtu_max: Mtu::Mtu4096,
            gids: GidPolicy::default(),
            pkey_index: 0,
            traffic_class: 0,
            service_level: 0,
            timeout: 14,
            retry_cnt: 6,
            hop_limit: 64,
            mr_bytes_max: 1 << 40,
            transfer_timeout: Duration::from_secs(30),
            progress_timeout: Duration::from_millis(500),
            limits: Limits::default(),
        }
    }
}

impl RdmaConfig {
    /// The defaults, overridden by what `settings` has.
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for the first value that is not allowed.
    pub fn from_settings(settings: &Settings<'_>) -> Result<Self, TransportError> {
        let mut config = Self::default();
        let or = |name, range, default: u32| {
            Ok::<u32, TransportError>(settings.number(name, range)?.unwrap_or(default))
        };
        config.qp_per_endpoint = or("NUM_QP_PER_EP", 1..=255, config.qp_per_endpoint)?;
        config.send_wr_max = or("MAX_WR", 1..=65_535, config.send_wr_max)?;
        config.cqe_max = or("MAX_CQE_PER_CTX", 1..=65_535, config.cqe_max)?;
        config.endpoints_max = or("MAX_EP_PER_CTX", 1..=65_535, config.endpoints_max)?;
        config.slicing = slicing(settings, config.slicing)?;
        if let Some(bytes) = settings.number("WINDOW_BYTES", 1..=1 << 40)? {
            config.window_bytes = bytes;
        }
        if let Some(mtu) = mtu(settings)? {
            config.mtu_max = mtu;
        }
        config.gids = GidPolicy::from_env(|variable| settings.variable(variable))?;
        config.pkey_index = or("PKEY_INDEX", 0..=65_535, 0)? as u16;
        config.traffic_class = or("IB_TC", 0..=255, 0)? as u8;
        config.service_level = or("IB_SL", 0..=15, 0)? as u8;
        config.timeout = or("QP_TIMEOUT", 1..=31, config.timeout.into())? as u8;
        config.retry_cnt = or("QP_RETRY_CNT", 0..=6, config.retry_cnt.into())? as u8;
        config.hop_limit = or("HOP_LIMIT", 1..=255, config.hop_limit.into())? as u8;
        if let Some(bytes) = settings.number("MAX_MR_SIZE", 4096..=u64::MAX)? {
            config.mr_bytes_max = bytes;
        }
        if let Some(seconds) = settings.number("TRANSFER_TIMEOUT", 5..=86_400)? {
            config.transfer_timeout = Duration::from_secs(seconds);
        }
        if let Some(millis) = settings.number("PROGRESS_TIMEOUT_MS", 10..=60_000)? {
            config.progress_timeout = Duration::from_millis(millis);
        }
        Ok(config)
    }
}

fn slicing(settings: &Settings<'_>, default: Slicing) -> Result<Slicing, TransportError> {
    let slice_bytes = settings
        .number("SLICE_SIZE", 1..=1 << 30)?
        .unwrap_or(default.slice_bytes);
    let ratio = settings.number("FRAGMENT_RATIO", 1..=slice_bytes.max(2) - 1)?;
    Ok(Slicing {
        slice_bytes,
        fragment_bytes: ratio.map_or(default.fragment_bytes, |ratio| slice_bytes / ratio),
    })
}

fn mtu(settings: &Settings<'_>) -> Result<Option<Mtu>, TransportError> {
    let Some(bytes) = settings.number::<u32>("MTU", 512..=4096)? else {
        return Ok(None);
    };
    match Mtu::from_bytes(bytes) {
        Some(mtu) if mtu.bytes() == bytes => Ok(Some(mtu)),
        _ => {
            let (variable, value) = settings.text("MTU").unwrap_or_default();
            Err(TransportError::Setting {
                variable,
                value,
                expected: "512, 1024, 2048 or 4096".into(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<RdmaConfig, TransportError> {
        let lookup = |variable: &str| {
            let pair = pairs.iter().find(|(name, _)| *name == variable);
            pair.map(|(_, value)| (*value).to_owned())
        };
        RdmaConfig::from_settings(&Settings::new(&lookup))
    }

    #[test]
    fn without_settings_the_values_are_those_of_the_wire() {
        let config = read(&[]).expect("defaults");
        assert_eq!(config, RdmaConfig::default());
        assert_eq!(config.qp_per_endpoint, 2);
        assert_eq!(config.retry_cnt, 6);
    }

    #[test]
    fn settings_keep_their_meaning() {
        let config = read(&[
            ("MC_NUM_QP_PER_EP", "4"),
            ("MC_SLICE_SIZE", "1000"),
            ("MC_FRAGMENT_RATIO", "4"),
            ("MC_MTU", "1024"),
        ])
        .expect("valid");
        assert_eq!(config.qp_per_endpoint, 4);
        assert_eq!(config.slicing.slice_bytes, 1000);
        assert_eq!(config.slicing.fragment_bytes, 250);
        assert_eq!(config.mtu_max, Mtu::Mtu1024);
    }

    #[test]
    fn u10_values_out_of_range_are_refused() {
        for (name, value) in [
            ("MC_NUM_QP_PER_EP", "0"),
            ("MC_NUM_QP_PER_EP", "256"),
            ("RERAIL_QP_RETRY_CNT", "7"),
            ("MC_MTU", "1500"),
            ("MC_GID_INDEX", ""),
            ("MC_SLICE_SIZE", "0"),
            ("MC_TRANSFER_TIMEOUT", "4"),
        ] {
            let error = read(&[(name, value)]).expect_err(name).to_string();
            assert!(error.starts_with(&format!("{name}=")), "{error}");
            assert!(error.contains(value), "{error}");
        }
    }
}
