//! From a NIC's change to the own record.

use rerail_transport::machine::ids::LocalNic;
use rerail_transport::machine::observer::PortFacts;
use rerail_transport::machine::publisher::Edit;
use rerail_transport::rdma::NicListener;
use rerail_verbs::Gid;

use crate::publication::Publication;

/// Enters into the own record what is true of the own NICs.
pub(crate) struct Recorder(pub(crate) Publication);

impl NicListener for Recorder {
    fn port(&self, local: LocalNic, facts: PortFacts, gids: Vec<Gid>) {
        self.0.edit(Edit::Port { local, facts, gids });
    }
}
