//! The scenarios, a file each.

use super::Scenario;

mod in_process;
mod interposer;
mod port_flap;
mod renumbered;

/// Declares the modules and lists their scenarios, so that a new one is a file and a word here.
macro_rules! scenarios {
    ($($module:ident),+ $(,)?) => {
        $(mod $module;)+

        /// All scenarios, in the order in which they run.
        #[must_use]
        pub fn all() -> &'static [&'static Scenario] {
            &[$(&$module::SCENARIO),+]
        }
    };
}

scenarios! {
    rig_in_order,
    rig_faults_and_repair,
    bench_moves_and_verifies,
    bench_two_rails,
    cpp_engine,
    gids_of_real_tables,
    port_flap_at_the_initiator,
    port_flap_at_the_target,
    both_rails_down,
    renumbered_target,
    renumbered_initiator,
    nothing_changed,
    silent_loss,
    store_outage,
    topology_and_gids_say_what_sysfs_says,
    rail_added,
    restarted_target,
    frozen,
    rails_apart,
    sigterm,
    rpc_unreachable,
    old_bytes,
    one_process,
    device_faults,
    control_verb_hangs,
    cpp_engine_through_faults,
    cpp_engines_through_faults,
    hundred_flaps,
    mtu,
    news_in_time,
    rdma_bind_address,
}
