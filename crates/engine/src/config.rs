//! Settings of an engine.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use rerail_metadata::{KeySpace, StoreOptions, StoreUrl};
use rerail_topology::TopologyOptions;
use rerail_transport::TransportError;
use rerail_transport::event::Events;
use rerail_transport::rdma::RdmaConfig;
use rerail_transport::rpc::ServerLimits;
use rerail_transport::rpc::client::ClientLimits;
use rerail_transport::settings::{Settings, environment};
use rerail_transport::tcp;

use crate::{EngineError, Result};

/// How the engine moves bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Transport {
    /// RDMA over verbs.
    Rdma,
    /// TCP, where there is no RDMA.
    Tcp,
}

impl Transport {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// Settings of an engine. Names of variables are given without their prefix `RERAIL_` or `MC_`;
/// see [`RdmaConfig`] for the transport's own.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineConfig {
    /// The metadata store, or `P2PHANDSHAKE`.
    pub metadata: StoreUrl,
    /// Time limits, credentials and TLS files of the store
    /// ([`StoreOptions::from_variables`] tells the variables).
    pub store: StoreOptions,
    /// Keys in the store (`METADATA_CLUSTER_ID`).
    pub keys: KeySpace,
    /// Name of the own segment. Without a store its RPC address takes its place.
    pub name: String,
    /// How the engine moves bytes (`FORCE_TCP`: `MC_FORCE_TCP` counts whenever it is set, whatever
    /// to; `RERAIL_FORCE_TCP` is 0, 1, true or false).
    pub transport: Transport,
    /// Devices as `name` or `name:port`; none means all. One must work at the start, and the others
    /// are taken in once they do.
    pub devices: Vec<String>,
    /// Host that peers are told (`TCP_BIND_ADDRESS`); found by itself where it is not set.
    pub advertise: Option<String>,
    /// Address that listeners bind (`BIND_ADDRESS`); any where it is not set.
    pub bind: Option<IpAddr>,
    /// Ports of the RPC server (`MIN_RPC_PORT`, `MAX_RPC_PORT`, 15000..=17000).
    pub rpc_ports: RangeInclusive<u16>,
    /// Bounds of the RPC server.
    pub rpc_server: ServerLimits,
    /// Bounds of questions to peers.
    pub rpc_client: ClientLimits,
    /// Bounds of TCP connections to peers (`TCP_LANES_PER_PEER` and others).
    pub tcp_client: tcp::ClientLimits,
    /// Bounds of serving memory over TCP.
    pub tcp_server: tcp::ServerLimits,
    /// Highest version of the TCP data protocol to speak (`TCP_PROTO`).
    pub tcp_version: tcp::Version,
    /// Address in the own NIC paths instead of the segment's name (`RDMA_BIND_ADDRESS`).
    pub rdma_bind: Option<String>,
    /// The RDMA transport.
    pub rdma: RdmaConfig,
    /// Who is told what happens to NICs, connections and the record.
    pub events: Events,
    /// A priority matrix in place of the discovered one (`CUSTOM_TOPOLOGY`, `MC_CUSTOM_TOPO_JSON`),
    /// and which GPUs are visible.
    pub topology: TopologyOptions,
}

impl EngineConfig {
    /// The defaults, with what the environment sets.
    ///
    /// # Errors
    ///
    /// A store URL or a setting that cannot be used.
    pub fn new(metadata: &str, name: &str) -> Result<Self> {
        Self::with_settings(metadata, name, &environment)
    }

    /// The defaults, with what `lookup` finds.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_settings(
        metadata: &str,
        name: &str,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let settings = Settings::new(lookup);
        let ports = 1024..=65_535_u16;
        let (first, last) = (
            settings
                .number("MIN_RPC_PORT", ports.clone())?
                .unwrap_or(15_000),
            settings.number("MAX_RPC_PORT", ports)?.unwrap_or(17_000),
        );
        if first > last {
            let (variable, value) = settings.text("MIN_RPC_PORT").unwrap_or_default();
            return Err(TransportError::Setting {
                variable,
                value,
                expected: format!("a number in 1024..={last}, the last port"),
            }
            .into());
        }
        if first <= *EPHEMERAL_PORTS.end() && last >= *EPHEMERAL_PORTS.start() {
            let either = settings
                .text("MIN_RPC_PORT")
                .or(settings.text("MAX_RPC_PORT"));
            let (variable, value) = either.unwrap_or_default();
            let (begin, end) = (EPHEMERAL_PORTS.start(), EPHEMERAL_PORTS.end());
            return Err(TransportError::Setting {
                variable,
                value,
                expected: format!(
                    "ports outside {begin}..={end}, which the kernel gives to outgoing \
                     connections: {first}..={last} meets them"
                ),
            }
            .into());
        }
        let metadata = StoreUrl::parse(metadata)?;
        Ok(Self {
            store: StoreOptions::from_variables(&metadata, lookup)?,
            metadata,
            keys: KeySpace::from_variables(lookup)?,
            name: name.to_owned(),
            transport: transport(&settings)?,
            devices: Vec::new(),
            advertise: settings.text("TCP_BIND_ADDRESS").map(|(_, host)| host),
            bind: bind(&settings)?,
            rpc_ports: first..=last,
            rpc_server: ServerLimits::from_settings(&settings)?,
            rpc_client: ClientLimits::from_settings(&settings)?,
            tcp_client: tcp::ClientLimits::from_settings(&settings)?,
            tcp_server: tcp::ServerLimits::from_settings(&settings)?,
            tcp_version: tcp::Version::from_settings(&settings)?,
            rdma_bind: settings.text("RDMA_BIND_ADDRESS").map(|(_, host)| host),
            rdma: RdmaConfig::from_settings(&settings)?,
            events: Events::default(),
            topology: TopologyOptions::from_env(lookup).map_err(|error| EngineError::Invalid {
                what: "a setting of the topology",
                reason: error.to_string(),
            })?,
        })
    }

    /// Without a store, descriptors are asked of the peers themselves.
    pub(crate) fn is_peer_to_peer(&self) -> bool {
        self.metadata == StoreUrl::PeerToPeer
    }
}

/// Ports that Linux takes for outgoing connections unless it is told otherwise: any of them may be
/// in use at any time (reference 2.9).
const EPHEMERAL_PORTS: RangeInclusive<u16> = 32_768..=60_999;

fn transport(settings: &Settings<'_>) -> Result<Transport> {
    let force_tcp = match settings.text("FORCE_TCP") {
        None => false,
        Some((variable, _)) if variable.starts_with("MC_") => true,
        Some((variable, value)) => match value.to_ascii_lowercase().as_str() {
            "1" | "true" => true,
            "0" | "false" => false,
            _ => {
                return Err(TransportError::Setting {
                    variable,
                    value,
                    expected: "0, 1, true or false".into(),
                }
                .into());
            }
        },
    };
    Ok(if force_tcp {
        Transport::Tcp
    } else {
        Transport::Rdma
    })
}

fn bind(settings: &Settings<'_>) -> Result<Option<IpAddr>> {
    let Some((variable, value)) = settings.text("BIND_ADDRESS") else {
        return Ok(None);
    };
    match value.parse() {
        Ok(address) => Ok(Some(address)),
        Err(_) => Err(TransportError::Setting {
            variable,
            value,
            expected: "an IP address".into(),
        }
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u10_the_stores_settings_are_read_with_the_engines() {
        let with = |value: &'static str| {
            let lookup = move |variable: &str| {
                (variable == "RERAIL_METADATA_TIMEOUT_MS").then(|| value.to_owned())
            };
            EngineConfig::with_settings("memory://settings", "a", &lookup)
        };
        let config = with("700").expect("valid");
        assert_eq!(config.store.deadline.as_millis(), 700);
        let error = with("99").expect_err("out of range").to_string();
        assert!(error.contains("RERAIL_METADATA_TIMEOUT_MS"), "{error}");
    }

    #[test]
    fn t21_tcp_can_be_forced() {
        let with = |name: &'static str, value: &'static str| {
            let lookup = move |variable: &str| (variable == name).then(|| value.to_owned());
            EngineConfig::with_settings("P2PHANDSHAKE", "a", &lookup).map(|config| config.transport)
        };
        assert_eq!(with("MC_OTHER", "").expect("valid"), Transport::Rdma);
        assert_eq!(with("MC_FORCE_TCP", "").expect("valid"), Transport::Tcp);
        assert_eq!(
            with("RERAIL_FORCE_TCP", "1").expect("valid"),
            Transport::Tcp
        );
        assert_eq!(
            with("RERAIL_FORCE_TCP", "0").expect("valid"),
            Transport::Rdma
        );
        assert!(with("RERAIL_FORCE_TCP", "yes").is_err());
    }

    #[test]
    fn u10_engine_settings_are_read_strictly() {
        let with = |name: &'static str, value: &'static str| {
            let lookup = move |variable: &str| (variable == name).then(|| value.to_owned());
            EngineConfig::with_settings("P2PHANDSHAKE", "a", &lookup)
        };
        let config = with("MC_TCP_BIND_ADDRESS", "10.0.0.1").expect("valid");
        assert_eq!(config.advertise.as_deref(), Some("10.0.0.1"));
        assert!(config.is_peer_to_peer());
        for (name, value) in [
            ("MC_MIN_RPC_PORT", "80"),
            ("MC_MIN_RPC_PORT", "17001"),
            ("MC_MAX_RPC_PORT", "32768"),
            ("MC_HANDSHAKE_LISTEN_BACKLOG", "0"),
            ("RERAIL_BIND_ADDRESS", "everywhere"),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", "3600"),
            ("MC_NUM_QP_PER_EP", "many"),
        ] {
            let error = with(name, value).expect_err(name).to_string();
            assert!(error.starts_with(&format!("{name}={value}")), "{error}");
        }
    }
}
