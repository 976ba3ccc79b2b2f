//! The machines of several nodes together, in virtual time: what no single one can show.

mod scenarios;
mod world;
