//! Which row of a port's GID table a NIC is opened with.

use rerail_verbs::{GidEntry, GidScope, GidType, LinkLayer};

/// The row to use, or why there is none.
pub(super) fn choose(
    table: &[GidEntry],
    link_layer: LinkLayer,
    index: Option<u32>,
) -> Result<&GidEntry, String> {
    if let Some(index) = index {
        return table
            .iter()
            .find(|row| row.index == index && !row.gid.is_null())
            .ok_or_else(|| format!("GID_INDEX={index} is an empty or missing row"));
    }
    let usable = table.iter().filter(|row| !row.gid.is_null());
    if link_layer == LinkLayer::InfiniBand {
        return usable
            .min_by_key(|row| row.index)
            .ok_or_else(|| "its GID table is empty".into());
    }
    usable
        .min_by_key(|row| {
            let version = match row.gid_type {
                GidType::RoceV2 => 0,
                GidType::RoceV1 => 2,
                _ => 1,
            };
            let link_local = row.gid.scope() != GidScope::Global;
            let ipv6 = row.gid.to_ipv4().is_none();
            (version, link_local, row.netdev.is_none(), ipv6, row.index)
        })
        .ok_or_else(|| "its GID table is empty".into())
}
