//! How communicators are made: of a control group, of the environment, and of another communicator.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use super::NcclError;
use super::comm::NcclComm;
use super::cuda::{Device, Stream, device_count};
use super::inner::{Inner, discard};
use super::library;
use super::options::NcclOptions;
use super::state::{Core, Handle, State};
use crate::collective::launcher::{self, Place};
use crate::collective::machine::Machine;
use crate::collective::operation::child_id;
use crate::collective::process::{self, ProcessOptions, RendezvousError};
use crate::collective::{Buffer, Collective, Request, threads};
use crate::{CommError, StartError, accounting::WireCounter};

/// What ranks tell each other before they connect.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Identity {
    machine: Machine,
    bus: String,
    nccl: u32,
}

/// Bytes of an identity on the wire.
const IDENTITY: usize = 512;

/// The color of a rank that will be in none of the new communicators: `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: i32 = -1;

impl Identity {
    fn of_this_process(device: &Device, nccl: u32) -> Self {
        Self { machine: Machine::here(), bus: device.bus.clone(), nccl }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("texts and numbers can be written as JSON");
        bytes.resize(IDENTITY, b' ');
        bytes
    }
}

fn version_name(version: u32) -> String {
    match version {
        old if old < 10_000 => format!("{}.{}.{}", old / 1000, old / 100 % 10, old % 100),
        new => format!("{}.{}.{}", new / 10_000, new / 100 % 100, new % 100),
    }
}

/// What is wrong with the ranks as they are, the same on all of them: libraries that differ, a device taken twice.
fn compare(all: &[Identity]) -> Result<(), NcclError> {
    for (rank, identity) in all.iter().enumerate() {
        if identity.nccl != all[0].nccl {
            let (first, other) = (version_name(all[0].nccl), version_name(identity.nccl));
            return Err(NcclError::Versions { rank, first, other });
        }
        let same = |other: &Identity| (&other.machine.id, &other.bus) == (&identity.machine.id, &identity.bus);
        if let Some(first) = all[..rank].iter().position(same) {
            let (bus, host) = (identity.bus.clone(), identity.machine.host.clone());
            return Err(NcclError::Duplicate { first, second: rank, bus, host });
        }
    }
    Ok(())
}

/// The lowest rank of each rank's machine.
fn leaders(all: &[Identity], node_size: Option<usize>) -> Vec<usize> {
    let machine = |rank: usize| all.iter().position(|other| other.machine.id == all[rank].machine.id).unwrap_or(rank);
    (0..all.len())
        .map(|rank| node_size.filter(|&size| size > 0).map_or(machine(rank), |size| rank / size * size))
        .collect()
}

/// The device for a rank that is `local_rank`-th on its machine: that one, or the only one, where a launcher shows each
/// process no other.
///
/// # Errors
///
/// [`NcclError`] without a driver or a device.
pub fn device_of(local_rank: usize) -> Result<usize, NcclError> {
    match device_count()? {
        1 => Ok(0),
        count if local_rank < count => Ok(local_rank),
        count => Err(NcclError::Device { ordinal: local_rank, count }),
    }
}

impl NcclComm {
    /// A communicator of all ranks of `control`, on this process's device `device`. A collective.
    ///
    /// The control group carries the library's unique identity, the comparison of devices, and, later, the news of a rank
    /// that fails: its deadline should be this one's. It may be of any engine; ranks that are threads of one process each
    /// need a device of their own, too.
    ///
    /// # Errors
    ///
    /// [`NcclError`], on every rank: the rank in trouble tells the others.
    pub fn new(control: Arc<dyn Collective>, device: usize, options: &NcclOptions) -> Result<Self, NcclError> {
        let made = Self::make(control.clone(), device, options);
        if let Err(error) = &made {
            // Ranks that still wait for this one hear why it does not come. What all have found needs no telling, and a
            // group that has failed already keeps its first reason.
            if !matches!(error, NcclError::Duplicate { .. } | NcclError::Versions { .. }) {
                control.abort(&error.to_string());
            }
        }
        made
    }

    /// As [`NcclComm::new`], of the job that the environment tells of ([`launcher::rendezvous`]), with a control group over
    /// sockets; without such an environment a communicator of this process alone. The device is `LOCAL_RANK`'s
    /// ([`device_of`]).
    ///
    /// # Errors
    ///
    /// [`NcclError`], of the environment and of the rendezvous too.
    pub fn from_environment(options: &NcclOptions) -> Result<Self, NcclError> {
        let job = launcher::rendezvous().map_err(|error| StartError::from(RendezvousError::from(error)))?;
        let local_rank = job.as_ref().and_then(|job| job.local_rank).unwrap_or(0);
        let Some(job) = job.filter(|job| job.world > 1) else {
            return Self::new(threads::alone(), device_of(local_rank)?, options);
        };
        // Before the others are kept waiting.
        library::library()?;
        let device = device_of(local_rank)?;
        let NcclOptions { deadline, flight_dir, node_size, .. } = options.clone();
        let control = ProcessOptions { deadline, flight_dir, node_size, ..ProcessOptions::default() };
        // Ranks on one device are told by its address on the bus: where a launcher shows each process one GPU, several may
        // have the same LOCAL_RANK.
        let job = launcher::Start::Job(launcher::Rendezvous { local_rank: None, ..job });
        Self::new(process::start(&control, &job)?.into_comm(), device, options)
    }

    fn make(control: Arc<dyn Collective>, device: usize, options: &NcclOptions) -> Result<Self, NcclError> {
        const WHAT: &str = "making a communicator";
        let library = library::library()?;
        let version = library.version()?;
        let device = Device::open(device)?;
        let mine = Identity::of_this_process(&device, version);
        let gathered = control.execute_for(Request::AllGather(Buffer::U8(mine.encode())), WHAT)?.into_u8();
        let (rank, world) = (control.rank(), control.world());
        let read = |bytes: &[u8]| serde_json::from_slice(bytes.trim_ascii()).unwrap_or_else(|_| mine.clone());
        let all: Vec<Identity> = gathered.chunks_exact(IDENTITY).map(read).collect();
        compare(&all)?;
        let place = Arc::new(Place::from_leaders(rank, &leaders(&all, options.node_size)));

        let _entered = device.enter()?;
        let mut id = ncclUniqueId { internal: [0; 128] };
        if rank == 0 {
            // SAFETY: the pointer is to a local.
            library.check("ncclGetUniqueId", unsafe { (library.get_unique_id)(&raw mut id) })?;
        }
        let bytes = id.internal.iter().map(|&byte| byte as u8).collect();
        let bytes = control.execute_for(Request::Broadcast(Buffer::U8(bytes), 0), WHAT)?.into_u8();
        id.internal.iter_mut().zip(bytes).for_each(|(to, from)| *to = from as _);

        let stream = Stream::new(&device, options.high_priority)?;
        let context_events = options.context_events && device.context_events;
        let core = Arc::new(Core {
            library,
            device: device.clone(),
            stream,
            label: control.label().into(),
            // Another identity than the control group's own: both record in one place.
            id: child_id(0, 0, 0x6e63_636c),
            members: (0..world).collect(),
            me: rank,
            deadline: options.deadline,
            wire: Arc::<WireCounter>::default(),
            order: Mutex::new(0),
            issued: AtomicU64::new(0),
            handle: Mutex::new(Handle(None)),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            control,
        });
        let here = core.here(0, "making the communicator");
        let mut comm: ncclComm_t = std::ptr::null_mut();
        let mut config = library::non_blocking(version);
        // SAFETY: the pointers are to locals, read during the call only; the context of the rank's device is current.
        let code = unsafe { (library.init)(&raw mut comm, world as i32, id, rank as i32, &raw mut config) };
        library.check("ncclCommInitRankConfig", code)?;
        if let Err(error) = core.until_done(comm, here) {
            discard(&core, comm);
            return Err(error.into());
        }
        core.handle.lock().0 = Some(comm);
        Ok(Self { inner: Inner::new(core, place, context_events, options.high_priority)? })
    }

    /// Communicators of the ranks that pass the same `color`, in the order of `key` and, where that is the same, of their
    /// ranks; none for a rank that passes none. A collective of this communicator, and of the control group. What has been
    /// issued before ends first.
    ///
    /// # Errors
    ///
    /// As any collective's. [`CommError::Device`] on a communicator that was itself split: split the one that it came from.
    pub fn split(&self, label: &str, color: Option<u32>, key: i32) -> Result<Option<Self>, CommError> {
        let core = &self.inner.core;
        let mut next = core.order.lock();
        let (seq, op) = (*next, format!("split into '{label}'"));
        *next += 1;
        core.issued.store(*next, Ordering::Relaxed);
        let here = core.here(seq, &op);
        core.sound()?;
        if core.members.len() != core.control.world() {
            return Err(here.failed("it was itself split from another; split that one"));
        }
        let color = color.map_or(NO_COLOR, |color| (color & i32::MAX as u32) as i32);
        let mine = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let all = core.control.execute_for(Request::AllGather(Buffer::U8(mine)), &op);
        let all = all.map_err(|error| core.fault(error))?.into_u8();
        let number = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let same = all.chunks_exact(8).enumerate().filter(|(_, of)| number(&of[..4]) == color);
        let mut members: Vec<(i32, usize)> = same.map(|(rank, of)| (number(&of[4..]), rank)).collect();
        members.sort_unstable();
        let members: Arc<[usize]> = members.into_iter().map(|(_, rank)| rank).collect();

        // The library wants nothing of the parent under way meanwhile.
        while core.busy() {
            core.poll()?;
            std::thread::sleep(Duration::from_micros(100));
        }
        let failed = |error: NcclError| core.fault(here.failed(error));
        let _entered = core.device.enter().map_err(failed)?;
        let mut comm: ncclComm_t = std::ptr::null_mut();
        {
            let handle = core.handle.lock();
            let Some(parent) = handle.0 else { return Err(here.failed("the communicator has been ended")) };
            // SAFETY: the parent is alive while the handle is locked, and the pointer to a local that lives until the call
            // has ended, which is waited for; without a configuration the child has its parent's.
            let code = unsafe { (core.library.split)(parent, color, key, &raw mut comm, std::ptr::null_mut()) };
            core.library.check("ncclCommSplit", code).map_err(failed)?;
            core.until_done(parent, here)?;
            if color != NO_COLOR && !comm.is_null() {
                core.until_done(comm, here).inspect_err(|_| discard(core, comm))?;
            }
        }
        if color == NO_COLOR {
            return Ok(None);
        }
        if comm.is_null() {
            return Err(failed(NcclError::Call { call: "ncclCommSplit", reason: "it gave no communicator".into() }));
        }
        let me = members.iter().position(|&rank| rank == core.rank()).expect("a rank has the color that it passed");
        let child = Arc::new(Core {
            library: core.library,
            device: core.device.clone(),
            stream: Stream::new(&core.device, self.inner.high_priority).map_err(failed)?,
            control: core.control.clone(),
            label: label.into(),
            id: child_id(core.id, seq, color as u64 + 1),
            members,
            me,
            deadline: core.deadline,
            wire: core.wire.clone(),
            order: Mutex::new(0),
            issued: AtomicU64::new(0),
            handle: Mutex::new(Handle(Some(comm))),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let Inner { place, context_events, high_priority, .. } = &*self.inner;
        let inner = Inner::new(child, place.clone(), *context_events, *high_priority).map_err(failed)?;
        Ok(Some(Self { inner }))
    }

    /// The ranks on the same machine. As [`NcclComm::split`].
    ///
    /// # Errors
    ///
    /// As [`NcclComm::split`]'s.
    pub fn split_by_node(&self, label: &str) -> Result<Self, CommError> {
        let node = self.place().node as u32;
        Ok(self.split(label, Some(node), 0)?.expect("a rank that passes a color is in a communicator"))
    }

    /// The ranks that have the same local rank on their machines. As [`NcclComm::split`].
    ///
    /// # Errors
    ///
    /// As [`NcclComm::split`]'s.
    pub fn split_across_nodes(&self, label: &str) -> Result<Self, CommError> {
        let local = self.place().local_rank as u32;
        Ok(self.split(label, Some(local), 0)?.expect("a rank that passes a color is in a communicator"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(machine: &str, bus: &str, nccl: u32) -> Identity {
        Identity { machine: Machine { id: machine.into(), host: format!("{machine}-name") }, bus: bus.into(), nccl }
    }

    #[test]
    fn what_ranks_share_and_what_they_must_not() {
        let (a, b) = (identity("a", "0:1", 22_304), identity("a", "0:2", 22_304));
        let other = identity("b", "0:1", 22_304);
        compare(&[a.clone(), b.clone(), other.clone()]).unwrap();
        assert_eq!(leaders(&[a.clone(), other.clone(), b.clone()], None), [0, 1, 0]);
        assert_eq!(leaders(&[a.clone(), other.clone(), b.clone()], Some(2)), [0, 0, 2]);
        let error = compare(&[other, a.clone(), a.clone()]).unwrap_err().to_string();
        assert!(error.starts_with("ranks 1 and 2 have both chosen the GPU at 0:1 of machine a-name"), "{error}");
        let error = compare(&[a, identity("a", "0:2", 21_805)]).unwrap_err().to_string();
        assert_eq!(error, "rank 1 has NCCL 2.18.5, but rank 0 has 2.23.4: install the same version for all ranks");
        assert_eq!(b.encode().len(), IDENTITY);
    }
}
