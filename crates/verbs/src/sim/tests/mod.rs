//! What must hold in a simulated fabric, through the public API.

mod conformance;
mod support;
