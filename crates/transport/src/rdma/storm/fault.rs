//! Kinds of faults.

use crate::machine::seen::words;

words! {
    /// What is broken. A kind that is made nowhere does not compile, and a long storm must have
    /// seen each.
    pub(super) enum Fault {
        PortFlap = "port flap",
        Renumber = "renumber",
        GidMoves = "gid moves",
        Loss = "loss",
        SlowWire = "slow wire",
        Partition = "partition",
        LostEvents = "lost events",
        DisturbedEvents = "disturbed events",
        HungVerbs = "hung verbs",
        DeadDevice = "dead device",
        LostCompletion = "lost completion",
        FailedWork = "failed work",
        RefusedPosts = "refused posts",
        LatePackets = "late packets",
        StoreOutage = "store outage",
        StoreEmptied = "store emptied",
        StoreForgetsToTell = "store forgets to tell",
        StoreLosesAnAnswer = "store loses an answer",
        Killed = "killed",
        Frozen = "frozen",
        Left = "left",
        SilentMessages = "silent messages",
        SlowMessages = "slow messages",
        LateWork = "late work",
        LateClose = "late close",
        Mtu = "mtu",
        Pkeys = "pkeys",
        BrokenQueuePair = "broken queue pair",
        EventWithoutACause = "event without a cause",
        Cancelled = "cancelled",
        Visitor = "visitor",
        RegisteredAnew = "registered anew",
        UnreadablePort = "unreadable port",
        PairsDoNotStop = "pairs do not stop",
        PeerClosed = "peer closed",
        NicComes = "NIC comes",
        NicGoes = "NIC goes",
        NicGoesAndComesBack = "NIC goes and comes back",
        SameNameTwice = "same name twice",
        SlowStore = "slow store",
        ForeignRecord = "foreign record",
    }
}
