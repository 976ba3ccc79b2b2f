//! The keys that documents live under (reference 2.3), the same on every store.

use crate::error::MetadataError;

/// Prefix of every key, before the cluster's id.
const ROOT: &str = "mooncake/";

/// The keys of one cluster. Two clusters on one store differ in their id (report M26).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct KeySpace {
    prefix: String,
}

impl Default for KeySpace {
    /// No cluster id: `mooncake/`.
    fn default() -> Self {
        Self {
            prefix: ROOT.to_owned(),
        }
    }
}

impl KeySpace {
    /// The keys of `cluster_id`. An empty id is the default; a `/` at its end is not doubled.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Setting`] for an id that starts with `/` or has control characters.
    pub fn with_cluster_id(cluster_id: &str) -> Result<Self, MetadataError> {
        if cluster_id.starts_with('/') || cluster_id.chars().any(char::is_control) {
            return Err(MetadataError::Setting {
                name: "MC_METADATA_CLUSTER_ID".into(),
                reason: format!(
                    "{cluster_id:?} must not start with '/' nor have control characters"
                ),
            });
        }
        if cluster_id.is_empty() {
            return Ok(Self::default());
        }
        let slash = if cluster_id.ends_with('/') { "" } else { "/" };
        Ok(Self {
            prefix: format!("{ROOT}{cluster_id}{slash}"),
        })
    }

    /// From `RERAIL_METADATA_CLUSTER_ID`, else `MC_METADATA_CLUSTER_ID`, as `variable` tells them.
    ///
    /// # Errors
    ///
    /// As [`KeySpace::with_cluster_id`].
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, MetadataError> {
        let id = variable("RERAIL_METADATA_CLUSTER_ID")
            .or_else(|| variable("MC_METADATA_CLUSTER_ID"))
            .unwrap_or_default();
        Self::with_cluster_id(&id)
    }

    /// What every key starts with, `/` at its end.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The key of a segment. A name with a `/` stands for itself, others go below `ram/`.
    pub fn segment(&self, name: &str) -> String {
        let directory = if name.contains('/') { "" } else { "ram/" };
        format!("{}{directory}{name}", self.prefix)
    }

    /// What the keys of segments without `/` in their name start with.
    pub fn segments(&self) -> String {
        format!("{}ram/", self.prefix)
    }

    /// The key of a server's RPC location.
    pub fn rpc_meta(&self, server_name: &str) -> String {
        format!("{}rpc_meta/{server_name}", self.prefix)
    }

    /// The name of the segment under `key`; `None` where `key` is no segment of this cluster.
    pub fn segment_name<'key>(&self, key: &'key str) -> Option<&'key str> {
        let rest = key.strip_prefix(&self.prefix)?;
        match rest.strip_prefix("ram/") {
            Some(name) => (!name.is_empty() && !name.contains('/')).then_some(name),
            None => (rest.contains('/') && !rest.starts_with("rpc_meta/")).then_some(rest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m26_keys_follow_the_reference_with_and_without_a_cluster() {
        let keys = KeySpace::default();
        assert_eq!(keys.segment("h:1"), "mooncake/ram/h:1");
        assert_eq!(keys.segment("nvmeof/foo"), "mooncake/nvmeof/foo");
        assert_eq!(
            keys.rpc_meta("[fd00::5]:14291"),
            "mooncake/rpc_meta/[fd00::5]:14291"
        );
        for id in ["dev", "dev/"] {
            let keys = KeySpace::with_cluster_id(id).expect("valid");
            assert_eq!(keys.segment("h:1"), "mooncake/dev/ram/h:1");
        }
        assert_eq!(
            KeySpace::with_cluster_id("").expect("valid"),
            KeySpace::default()
        );
        assert!(KeySpace::with_cluster_id("/dev").is_err());
    }

    #[test]
    fn names_are_read_back_from_their_keys() {
        let keys = KeySpace::with_cluster_id("dev").expect("valid");
        for name in ["h:1", "nvmeof/foo"] {
            assert_eq!(keys.segment_name(&keys.segment(name)), Some(name));
        }
        assert_eq!(keys.segment_name(&keys.rpc_meta("h:1")), None);
        assert_eq!(keys.segment_name("mooncake/ram/h:1"), None);
    }

    #[test]
    fn the_rerail_variable_wins() {
        let keys = KeySpace::from_variables(|name| match name {
            "RERAIL_METADATA_CLUSTER_ID" => Some("r".into()),
            _ => Some("m".into()),
        });
        assert_eq!(keys.expect("valid").prefix(), "mooncake/r/");
    }
}
