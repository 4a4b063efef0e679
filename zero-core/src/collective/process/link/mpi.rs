//! A link over the MPI library: messages of bytes on two communicators, and the ranks' places on machines.
//!
//! All calls are made on the thread that called [`MpiLink::open`] (`MPI_THREAD_FUNNELED`); the type is neither `Send` nor
//! `Sync`, which guarantees this. Errors are returned (`MPI_ERRORS_RETURN`), never fatal inside MPI.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use mpi::ffi;

use super::super::super::launcher::Topology;
use super::{Channel, Heard, Link, MAX_CHUNK};
use crate::collective::error::LinkError;

/// A send or receive that MPI has not finished.
#[derive(Debug)]
pub(in super::super) struct Ongoing(ffi::MPI_Request);

pub(in super::super) struct MpiLink {
    control: ffi::MPI_Comm,
    data: ffi::MPI_Comm,
    /// MPI calls belong to one thread.
    _here: PhantomData<*const ()>,
}

/// Turns a return code into a result.
fn checked(call: &'static str, code: c_int) -> Result<(), LinkError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the array has the length that MPI requires; the call may be made at any time after MPI's start.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) };
    let length = if known == ffi::MPI_SUCCESS as c_int { length.max(0) as usize } else { 0 };
    let reason = match length {
        0 => format!("code {code}"),
        _ => String::from_utf8_lossy(&text[..length.min(text.len())]).into_owned(),
    };
    Err(LinkError { call, reason })
}

impl MpiLink {
    /// Starts MPI, and determines this rank's place. `node_size` consecutive ranks, if given, count as one machine.
    pub(in super::super) fn open(node_size: Option<usize>) -> Result<(Self, Topology), LinkError> {
        let mut flag: c_int = 0;
        // SAFETY: this call may be made before MPI is started; the pointer is to a local.
        checked("MPI_Initialized", unsafe { ffi::MPI_Initialized(&raw mut flag) })?;
        if flag != 0 {
            let reason = "MPI is already initialized: a process can run only one rank, and only once".to_string();
            return Err(LinkError { call: "MPI_Init_thread", reason });
        }
        let mut provided: c_int = 0;
        // SAFETY: null arguments are allowed since MPI-2; MPI is not started (above); reading MPI's constants is reading
        // statics that are never written.
        unsafe {
            let (funneled, none) = (ffi::RSMPI_THREAD_FUNNELED, std::ptr::null_mut());
            checked("MPI_Init_thread", ffi::MPI_Init_thread(none, std::ptr::null_mut(), funneled, &raw mut provided))?;
            if provided < funneled {
                let reason = format!("expected thread support of level {funneled} or higher, got {provided}");
                return Err(LinkError { call: "MPI_Init_thread", reason });
            }
            checked(
                "MPI_Comm_set_errhandler",
                ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN),
            )?;
        }
        let link = Self { control: duplicate()?, data: duplicate()?, _here: PhantomData };
        let place = link.place(node_size)?;
        Ok((link, place))
    }

    /// Determines this rank's place. All ranks have just started MPI, so that MPI's own collectives match here.
    fn place(&self, node_size: Option<usize>) -> Result<Topology, LinkError> {
        let (rank, world) = size_of(self.control)?;
        let mut leader = rank as c_int;
        match node_size {
            Some(ranks) => leader = (rank - rank % ranks.max(1)) as c_int,
            None => {
                let mut node = MaybeUninit::<ffi::MPI_Comm>::uninit();
                // SAFETY: the call writes `node` if it succeeds, and only then is it read; the leader is a local that the
                // ranks of one machine agree on: the lowest is rank 0 there.
                unsafe {
                    let (kind, info) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
                    let split = ffi::MPI_Comm_split_type(self.control, kind, rank as c_int, info, node.as_mut_ptr());
                    checked("MPI_Comm_split_type", split)?;
                    let mut node = node.assume_init();
                    let leader = (&raw mut leader).cast::<c_void>();
                    checked("MPI_Bcast", ffi::MPI_Bcast(leader, 4, ffi::RSMPI_UINT8_T, 0, node))?;
                    checked("MPI_Comm_free", ffi::MPI_Comm_free(&raw mut node))?;
                }
            }
        }
        let mut leaders = vec![0 as c_int; world];
        // SAFETY: a local of 4 bytes is sent and `world` times 4 bytes are received into a vector of that size.
        checked("MPI_Allgather", unsafe {
            let (from, to) = ((&raw const leader).cast(), leaders.as_mut_ptr().cast());
            ffi::MPI_Allgather(from, 4, ffi::RSMPI_UINT8_T, to, 4, ffi::RSMPI_UINT8_T, self.control)
        })?;
        Ok(Topology::from_leaders(rank, &leaders.iter().map(|&leader| leader.max(0) as usize).collect::<Vec<_>>()))
    }

    fn comm(&self, channel: Channel) -> ffi::MPI_Comm {
        match channel {
            Channel::Control => self.control,
            Channel::Data => self.data,
        }
    }
}

impl Link for MpiLink {
    type Ongoing = Ongoing;

    unsafe fn send(&mut self, channel: Channel, to: usize, tag: i32, bytes: &[u8]) -> Result<Ongoing, LinkError> {
        let length = bytes.len();
        assert!(length <= MAX_CHUNK, "payloads are cut into messages that MPI can count");
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller guarantees that the bytes are valid; the call writes `request` if it succeeds, and only then is it read.
        unsafe {
            let (bytes, length, comm) = (bytes.as_ptr().cast::<c_void>(), length as c_int, self.comm(channel));
            let code = ffi::MPI_Isend(bytes, length, ffi::RSMPI_UINT8_T, to as c_int, tag, comm, request.as_mut_ptr());
            checked("MPI_Isend", code)?;
            Ok(Ongoing(request.assume_init()))
        }
    }

    unsafe fn receive(&mut self, from: usize, tag: i32, to: *mut u8, length: usize) -> Result<Ongoing, LinkError> {
        assert!(length <= MAX_CHUNK, "payloads are cut into messages that MPI can count");
        let mut request = MaybeUninit::uninit();
        // SAFETY: as in `send`.
        unsafe {
            let (to, length, comm) = (to.cast::<c_void>(), length as c_int, self.comm(Channel::Data));
            let code = ffi::MPI_Irecv(to, length, ffi::RSMPI_UINT8_T, from as c_int, tag, comm, request.as_mut_ptr());
            checked("MPI_Irecv", code)?;
            Ok(Ongoing(request.assume_init()))
        }
    }

    fn test(&mut self, ongoing: &mut Ongoing) -> Result<Option<usize>, LinkError> {
        let (mut flag, mut status) = (0, MaybeUninit::<ffi::MPI_Status>::zeroed());
        // SAFETY: the request is a live one of MPI's, not yet completed by a test; a status of zeros is a valid value.
        unsafe {
            checked("MPI_Test", ffi::MPI_Test(&raw mut ongoing.0, &raw mut flag, status.as_mut_ptr()))?;
            if flag == 0 { Ok(None) } else { count(&status.assume_init()).map(Some) }
        }
    }

    fn next_message(&mut self) -> Result<Option<Heard>, LinkError> {
        let (mut flag, mut status) = (0, MaybeUninit::<ffi::MPI_Status>::zeroed());
        // SAFETY: as in `test`; the message fits the vector, whose length MPI has reported, and has already been announced:
        // control messages are short enough to be sent with their announcement.
        unsafe {
            let (any, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            checked("MPI_Iprobe", ffi::MPI_Iprobe(any, tag, self.control, &raw mut flag, status.as_mut_ptr()))?;
            if flag == 0 {
                return Ok(None);
            }
            let status = status.assume_init();
            let mut bytes = vec![0u8; count(&status)?];
            let (to, length) = (bytes.as_mut_ptr().cast::<c_void>(), bytes.len() as c_int);
            let (from, tag) = (status.MPI_SOURCE, status.MPI_TAG);
            let code = ffi::MPI_Recv(to, length, ffi::RSMPI_UINT8_T, from, tag, self.control, ffi::RSMPI_STATUS_IGNORE);
            checked("MPI_Recv", code)?;
            Ok(Some(Heard::Message { from: from as usize, bytes }))
        }
    }

    /// Finalizes MPI. It waits for all ranks, so every rank must call it.
    fn close(self) -> Result<(), LinkError> {
        // SAFETY: MPI was started by `open`, on this thread, and is not used after this.
        checked("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

fn duplicate() -> Result<ffi::MPI_Comm, LinkError> {
    let mut copy = MaybeUninit::uninit();
    // SAFETY: the call writes `copy` if it succeeds, and only then is it read. The error handler is inherited.
    unsafe {
        checked("MPI_Comm_dup", ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, copy.as_mut_ptr()))?;
        Ok(copy.assume_init())
    }
}

fn size_of(comm: ffi::MPI_Comm) -> Result<(usize, usize), LinkError> {
    let (mut rank, mut world) = (0, 0);
    // SAFETY: the pointers are to locals, the communicator is a live one.
    unsafe {
        checked("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &raw mut rank))?;
        checked("MPI_Comm_size", ffi::MPI_Comm_size(comm, &raw mut world))?;
    }
    Ok((rank as usize, world as usize))
}

fn count(status: &ffi::MPI_Status) -> Result<usize, LinkError> {
    let mut bytes = 0;
    // SAFETY: MPI wrote the status, or it belongs to a send, for which any number will do.
    checked("MPI_Get_count", unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &raw mut bytes) })?;
    Ok(bytes.max(0) as usize)
}
