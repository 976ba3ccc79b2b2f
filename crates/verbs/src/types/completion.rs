//! Work completions.

use std::fmt;

macro_rules! raw_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $raw:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$vdoc])* $variant,)*
            /// A number that is not known.
            Other(u32),
        }

        impl $name {
            /// From the verbs number.
            pub fn from_raw(raw: u32) -> Self {
                match raw {
                    $($raw => Self::$variant,)*
                    other => Self::Other(other),
                }
            }

            /// The verbs number.
            pub fn to_raw(self) -> u32 {
                match self {
                    $(Self::$variant => $raw,)*
                    Self::Other(other) => other,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    Self::Other(number) => write!(f, "unknown ({number})"),
                }
            }
        }
    };
}
pub(super) use raw_enum;

raw_enum! {
    /// Status of a work completion (`enum ibv_wc_status`).
    WcStatus {
        /// The work is done.
        Success = 0, "SUCCESS";
        /// A local buffer is too small, or the peer's message exceeds the path MTU.
        LocLenErr = 1, "LOC_LEN_ERR";
        /// The local queue pair cannot execute the work, for example because its port is down.
        LocQpOpErr = 2, "LOC_QP_OP_ERR";
        /// End-to-end context error; reliable datagram only.
        LocEecOpErr = 3, "LOC_EEC_OP_ERR";
        /// A local key does not cover the local buffer.
        LocProtErr = 4, "LOC_PROT_ERR";
        /// Flushed because the queue pair is in the error state. Says nothing about a cause.
        WrFlushErr = 5, "WR_FLUSH_ERR";
        /// A memory window could not be bound.
        MwBindErr = 6, "MW_BIND_ERR";
        /// The responder sent an unexpected operation.
        BadRespErr = 7, "BAD_RESP_ERR";
        /// A protection error on a local receive buffer.
        LocAccessErr = 8, "LOC_ACCESS_ERR";
        /// The responder found the message invalid.
        RemInvReqErr = 9, "REM_INV_REQ_ERR";
        /// The remote key does not allow the access.
        RemAccessErr = 10, "REM_ACCESS_ERR";
        /// The responder could not complete the operation.
        RemOpErr = 11, "REM_OP_ERR";
        /// The peer did not acknowledge within timeout times retries.
        RetryExcErr = 12, "RETRY_EXC_ERR";
        /// The peer had no receive buffer ready for too long.
        RnrRetryExcErr = 13, "RNR_RETRY_EXC_ERR";
        /// Reliable datagram domain violation.
        LocRddViolErr = 14, "LOC_RDD_VIOL_ERR";
        /// Invalid reliable datagram request.
        RemInvRdReqErr = 15, "REM_INV_RD_REQ_ERR";
        /// The operation was aborted.
        RemAbortErr = 16, "REM_ABORT_ERR";
        /// Invalid end-to-end context number.
        InvEecnErr = 17, "INV_EECN_ERR";
        /// Invalid end-to-end context state.
        InvEecStateErr = 18, "INV_EEC_STATE_ERR";
        /// A fatal transport error.
        FatalErr = 19, "FATAL_ERR";
        /// The responder did not answer in time.
        RespTimeoutErr = 20, "RESP_TIMEOUT_ERR";
        /// Any other error.
        GeneralErr = 21, "GENERAL_ERR";
    }
}

raw_enum! {
    /// Operation of a work completion (`enum ibv_wc_opcode`). Undefined on an error completion.
    WcOpcode {
        /// A send.
        Send = 0, "SEND";
        /// An RDMA write.
        RdmaWrite = 1, "RDMA_WRITE";
        /// An RDMA read.
        RdmaRead = 2, "RDMA_READ";
        /// A compare-and-swap.
        CompSwap = 3, "COMP_SWAP";
        /// A fetch-and-add.
        FetchAdd = 4, "FETCH_ADD";
        /// A bind of a memory window.
        BindMw = 5, "BIND_MW";
        /// An invalidation of a local key.
        LocalInv = 6, "LOCAL_INV";
        /// A receive.
        Recv = 128, "RECV";
        /// A receive that consumed an RDMA write's immediate.
        RecvRdmaWithImm = 129, "RECV_RDMA_WITH_IMM";
    }
}

/// One work completion (`struct ibv_wc`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The identifier that was given to the work request.
    pub wr_id: u64,
    /// What became of it.
    pub status: WcStatus,
    /// The driver's own number for an error; 0 on success.
    pub vendor_err: u32,
    /// The operation; undefined unless `status` is a success.
    pub opcode: WcOpcode,
    /// Bytes of a read or receive; undefined for a write.
    pub byte_len: u32,
    /// Number of the local queue pair. Numbers are reused: identify work by `wr_id`.
    pub qp_num: u32,
}

impl Completion {
    /// A value to fill a poll buffer with.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        status: WcStatus::GeneralErr,
        vendor_err: 0,
        opcode: WcOpcode::RdmaWrite,
        byte_len: 0,
        qp_num: 0,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_the_round_trip() {
        for raw in (0..300).chain([u32::MAX]) {
            assert_eq!(WcStatus::from_raw(raw).to_raw(), raw);
            assert_eq!(WcOpcode::from_raw(raw).to_raw(), raw);
        }
        assert_eq!(WcStatus::from_raw(22), WcStatus::Other(22));
        assert_eq!(WcStatus::from_raw(12).to_string(), "RETRY_EXC_ERR");
    }
}
