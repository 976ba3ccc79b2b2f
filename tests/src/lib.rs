//! What the cross-crate tests share: starting the program, reading its reports, and the scenarios
//! of the soft-RoCE guest.
//!
//! Nothing here calls into the library crates: these tests see what a user sees, the program and
//! the wire. Tests of one crate's insides belong into that crate.

#![forbid(unsafe_code)]

pub mod bench;
pub mod child;
pub mod guest;
pub mod interop;
pub mod store;
