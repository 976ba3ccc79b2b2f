//! `interop`: the interop table over TCP on this machine. `cargo xtask interop` starts it; the
//! table over RDMA is a scenario of the guest.

use std::process::ExitCode;

use rerail_tests::interop;

fn main() -> ExitCode {
    match interop::run(interop::TCP) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("interop: {error:#}");
            ExitCode::FAILURE
        }
    }
}
