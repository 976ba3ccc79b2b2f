//! Reading a port: everything that the observer compares, all of it fresh.

use rerail_verbs::{Context, VerbsError};

use crate::machine::observer::{PortReading, ReadFailure};

/// Queries state, GID table and P_Keys of a port. Calls verbs on the caller's thread.
pub(in crate::rdma) fn read_port(
    context: &Context,
    port: u32,
    pkey_index: u16,
) -> Result<PortReading, VerbsError> {
    let attr = context.port_attr(port)?;
    let gids = context.gid_table(port)?;
    let pkeys = u32::from(attr.pkey_tbl_len).min(u32::from(pkey_index) + 1);
    let pkeys = (0..pkeys)
        .map(|index| context.pkey(port, index as u16))
        .collect::<Result<_, _>>()?;
    Ok(PortReading {
        attr,
        gids,
        unreadable: Vec::new(),
        netdevs: Vec::new(),
        pkeys,
    })
}

/// What the observer is told of a query that failed.
pub(super) fn failure(error: &VerbsError) -> ReadFailure {
    match error {
        VerbsError::Verb { verb, errno, .. } => ReadFailure {
            query: verb,
            errno: *errno,
        },
        _ => ReadFailure {
            query: "reading the port",
            errno: 0,
        },
    }
}
