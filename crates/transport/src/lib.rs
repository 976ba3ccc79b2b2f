#![forbid(unsafe_code)]
//! Transports that survive faults. See the module list.

pub mod machine;
