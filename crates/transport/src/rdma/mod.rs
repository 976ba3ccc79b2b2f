//! The RDMA transport.
//!
//! | module | holds |
//! |---|---|
//! | [`transfer`] | accounting of one request: every byte ends exactly once |
//! | [`slice`](mod@slice) | where a request is cut |
//! | [`slab`] | keys that are never reused, for `wr_id` |
//! | [`endpoint`] | the life of one connection, as a machine |

pub mod endpoint;
pub mod slab;
pub mod slice;
pub mod transfer;
