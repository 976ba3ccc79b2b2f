//! What to do about an error of the engine, by its kind.

use std::io::ErrorKind;

use rerail_engine::EngineError;
use rerail_metadata::MetadataError;
use rerail_transport::TransportError;

/// What to do about `error`; `otherwise` where its kind does not tell.
pub(super) fn about(error: &EngineError, otherwise: &str) -> String {
    match error {
        EngineError::Listen { kind, .. } => listening(*kind),
        EngineError::Metadata(error) => store(error).unwrap_or(otherwise).to_owned(),
        EngineError::Transport(TransportError::UnknownDevice { .. }) => {
            "name devices that are there (`rdma link` lists them) with --device; where there are \
             none, use --protocol tcp"
                .to_owned()
        }
        EngineError::Transport(
            TransportError::Verbs(_) | TransportError::Device { .. } | TransportError::Port { .. },
        ) => {
            "look at the devices and their ports with `rdma link`, or use --protocol tcp".to_owned()
        }
        _ => otherwise.to_owned(),
    }
}

fn listening(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::AddrInUse => {
            "widen the range of ports with MC_MIN_RPC_PORT and MC_MAX_RPC_PORT (15000 to 17000 \
             unless they are set), or stop what uses them: an engine takes one port of it for RPC, \
             and over TCP a second one for data"
        }
        ErrorKind::AddrNotAvailable => {
            "set RERAIL_BIND_ADDRESS (or MC_BIND_ADDRESS) to an address of this machine (`ip addr` \
             lists them), or unset it to listen on all"
        }
        ErrorKind::PermissionDenied => "allow the process to listen on ports",
        _ => "raise the limit of open files (`ulimit -n`)",
    }
    .to_owned()
}

fn store(error: &MetadataError) -> Option<&'static str> {
    match error {
        MetadataError::Unavailable { .. } | MetadataError::TimedOut { .. } => {
            Some("check that the metadata store is up, and its address in --metadata")
        }
        MetadataError::Refused { .. } => Some(
            "check the path of the store in --metadata, and its credentials \
             (RERAIL_METADATA_USER and RERAIL_METADATA_PASSWORD, or RERAIL_METADATA_TOKEN)",
        ),
        MetadataError::Unsupported { .. } => Some(
            "build the program with the store's feature (`--features etcd`, `redis` or `http`; all \
             are on by default), or use another store",
        ),
        MetadataError::Setting { .. } => Some("correct or unset the variable"),
        MetadataError::TooLarge { .. } => {
            Some("raise the store's limit of a value, or register less memory")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_the_kind_of_the_error() {
        let listen = |kind| EngineError::Listen {
            what: "the RPC server cannot be started",
            kind,
            reason: String::new(),
        };
        let store = String::from("etcd://h:1");
        let cases = [
            (listen(ErrorKind::AddrInUse), "MC_MIN_RPC_PORT"),
            (listen(ErrorKind::AddrNotAvailable), "RERAIL_BIND_ADDRESS"),
            (
                TransportError::UnknownDevice {
                    device: "a".into(),
                    available: String::new(),
                }
                .into(),
                "--protocol tcp",
            ),
            (
                MetadataError::Unavailable {
                    store: store.clone(),
                    operation: "get",
                    reason: "refused".into(),
                }
                .into(),
                "that the metadata store is up",
            ),
            (
                MetadataError::Unsupported {
                    store,
                    operation: "be opened",
                    reason: String::new(),
                }
                .into(),
                "--features etcd",
            ),
            (EngineError::Transport(TransportError::Closed), "else"),
        ];
        for (error, expected) in cases {
            let advice = about(&error, "else");
            assert!(advice.contains(expected), "{error}: {advice}");
        }
    }
}
