//! What must hold in a simulated fabric, through the public API.

mod chaos;
mod conformance;
mod data;
mod determinism;
mod device;
mod events;
mod ghosts;
mod ports;
mod queue_pair;
mod real_time;
mod support;
