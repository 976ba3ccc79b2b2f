//! The variables that engines read, for programs that tell their users of wrong names.
//!
//! Deliberately not here: what they mean, which the README's table tells, and reading them.

/// All variables with the prefix `RERAIL_` that [`EngineConfig::new`](crate::EngineConfig::new)
/// reads, in alphabetical order. Many have an older name as well, with the prefix `MC_`.
pub const VARIABLES: &[&str] = &[
    "RERAIL_BIND_ADDRESS",
    "RERAIL_CUSTOM_TOPOLOGY",
    "RERAIL_DEVICES",
    "RERAIL_ETCD_MAX_REQUEST_BYTES",
    "RERAIL_FORCE_TCP",
    "RERAIL_FRAGMENT_RATIO",
    "RERAIL_GID_INDEX",
    "RERAIL_GID_NETDEVS",
    "RERAIL_GID_SUBNETS",
    "RERAIL_HANDSHAKE_CONNECT_TIMEOUT",
    "RERAIL_HANDSHAKE_LISTEN_BACKLOG",
    "RERAIL_HANDSHAKE_MAX_LENGTH",
    "RERAIL_HOP_LIMIT",
    "RERAIL_IB_SL",
    "RERAIL_IB_TC",
    "RERAIL_MAX_CQE_PER_CTX",
    "RERAIL_MAX_EP_PER_CTX",
    "RERAIL_MAX_MR_SIZE",
    "RERAIL_MAX_RPC_PORT",
    "RERAIL_MAX_WR",
    "RERAIL_METADATA_CA_FILE",
    "RERAIL_METADATA_CERT_FILE",
    "RERAIL_METADATA_CLUSTER_ID",
    "RERAIL_METADATA_KEY_FILE",
    "RERAIL_METADATA_PASSWORD",
    "RERAIL_METADATA_PASSWORD_FILE",
    "RERAIL_METADATA_POLL_MS",
    "RERAIL_METADATA_TIMEOUT_MS",
    "RERAIL_METADATA_TOKEN",
    "RERAIL_METADATA_TOKEN_FILE",
    "RERAIL_METADATA_USER",
    "RERAIL_MIN_RPC_PORT",
    "RERAIL_MTU",
    "RERAIL_NUM_QP_PER_EP",
    "RERAIL_PKEY_INDEX",
    "RERAIL_PROGRESS_TIMEOUT_MS",
    "RERAIL_QP_RETRY_CNT",
    "RERAIL_QP_TIMEOUT",
    "RERAIL_RDMA_BIND_ADDRESS",
    "RERAIL_REDIS_DB_INDEX",
    "RERAIL_SLICE_SIZE",
    "RERAIL_TCP_BIND_ADDRESS",
    "RERAIL_TCP_LANES_PER_PEER",
    "RERAIL_TCP_MAX_CONNECTIONS_PER_PEER",
    "RERAIL_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
    "RERAIL_TCP_PROTO",
    "RERAIL_TCP_SLICE_SIZE",
    "RERAIL_TCP_STATUS_TIMEOUT_SEC",
    "RERAIL_TRANSFER_TIMEOUT",
    "RERAIL_WINDOW_BYTES",
];

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::VARIABLES;
    use crate::EngineConfig;

    #[test]
    fn each_variable_that_is_read_is_listed_and_described() {
        let read = RefCell::new(BTreeSet::new());
        let lookup = |variable: &str| {
            read.borrow_mut().insert(variable.to_owned());
            None
        };
        // Some are read for Redis only.
        EngineConfig::with_settings("redis://h:1", "a", &lookup).expect("defaults");
        let read = read.into_inner();
        let own: Vec<&str> = read
            .iter()
            .map(String::as_str)
            .filter(|variable| variable.starts_with("RERAIL_"))
            .collect();
        assert_eq!(own, VARIABLES, "what is read, and what is listed");

        let readme = include_str!("../README.md");
        for variable in &read {
            let (prefix, name) = variable.split_once('_').expect("a prefix");
            // One that has both prefixes is named without.
            let has_both = matches!(prefix, "RERAIL" | "MC")
                && ["RERAIL_", "MC_"]
                    .iter()
                    .all(|prefix| read.contains(&format!("{prefix}{name}")));
            let shown = if has_both { name } else { variable };
            assert!(
                readme.contains(&format!("`{shown}`")),
                "the README's settings lack {shown}"
            );
        }
    }
}
