#![forbid(unsafe_code)]
//! See README.md.
