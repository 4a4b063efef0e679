//! Creation of communicators: from a control group, from the environment, or by splitting another communicator.

use std::sync::Arc;
use std::time::Duration;

use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};
use serde::{Deserialize, Serialize};

use super::NcclError;
use super::comm::{NcclComm, NcclOptions};
use super::cuda::{Device, device_count};
use super::inner::{Inner, discard};
use super::library;
use super::state::Core;
use crate::collective::launcher;
use crate::collective::machine::Machine;
use crate::collective::operation::child_id;
use crate::collective::process::{self, ProcessOptions, RendezvousError};
use crate::collective::{Buffer, Collective, Request, threads};
use crate::{CommError, StartError};

/// Description that ranks exchange before they connect.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Identity {
    machine: Machine,
    bus: String,
    nccl: u32,
}

/// Size in bytes of an identity on the wire.
const IDENTITY: usize = 512;

impl Identity {
    fn of_this_process(device: &Device, nccl: u32) -> Self {
        Self { machine: on_host(Machine::here(), std::env::var("NCCL_HOSTID").ok()), bus: device.bus.clone(), nccl }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("texts and numbers can be written as JSON");
        bytes.resize(IDENTITY, b' ');
        bytes
    }
}

/// Returns the machine as NCCL sees it: processes with different values of `NCCL_HOSTID` count as ranks of different hosts, which
/// may share a GPU and communicate over sockets.
fn on_host(machine: Machine, host_id: Option<String>) -> Machine {
    match host_id.filter(|host_id| !host_id.is_empty()) {
        Some(host_id) => {
            Machine { id: format!("{}/{}", machine.id, host_id.chars().take(64).collect::<String>()), ..machine }
        }
        None => machine,
    }
}

fn version_name(version: u32) -> String {
    match version {
        old if old < 10_000 => format!("{}.{}.{}", old / 1000, old / 100 % 10, old % 100),
        new => format!("{}.{}.{}", new / 10_000, new / 100 % 100, new % 100),
    }
}

/// Returns an error, the same on all ranks, if their libraries differ or two use the same device.
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

/// Returns the device for local rank `local_rank`: the device with that index, or the only visible one, if a launcher shows each
/// process only its own.
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
    /// Creates a communicator of all ranks of `control`, on this process's device `device`. A collective operation.
    ///
    /// The control group carries the library's unique identity, the comparison of devices, and, later, notifications of
    /// failed ranks, so it should have the same deadline. It may be of any engine. Ranks that are threads of one process also
    /// need a separate device each.
    ///
    /// # Errors
    ///
    /// [`NcclError`], on every rank: the rank that fails notifies the others.
    pub fn new(control: Arc<dyn Collective>, device: usize, options: &NcclOptions) -> Result<Self, NcclError> {
        let made = Self::make(control.clone(), device, options);
        if let Err(error) = &made {
            // Notifies ranks that still wait for this one. All ranks detect these two errors by themselves, and a group that
            // has already failed keeps its first reason.
            if !matches!(error, NcclError::Duplicate { .. } | NcclError::Versions { .. }) {
                control.abort(&error.to_string());
            }
        }
        made
    }

    /// Creates a communicator like [`NcclComm::new`] for the job that the environment describes ([`launcher::rendezvous`]), with a
    /// control group over sockets; without such an environment, a communicator of this process alone. `LOCAL_RANK` selects the
    /// device ([`device_of`]).
    ///
    /// # Errors
    ///
    /// [`NcclError`], which includes errors of the environment and of the rendezvous.
    pub fn from_environment(options: &NcclOptions) -> Result<Self, NcclError> {
        let job = launcher::rendezvous().map_err(|error| StartError::from(RendezvousError::from(error)))?;
        let local_rank = job.as_ref().and_then(|job| job.local_rank).unwrap_or(0);
        let Some(job) = job.filter(|job| job.world > 1) else {
            return Self::new(threads::alone(), device_of(local_rank)?, options);
        };
        // Checked before the other ranks wait for this one.
        library::library()?;
        let device = device_of(local_rank)?;
        let NcclOptions { deadline, flight_dir, node_size, .. } = options.clone();
        let control = ProcessOptions { deadline, flight_dir, node_size, ..ProcessOptions::default() };
        // Ranks on one device are detected by its bus address: if a launcher shows each process one GPU, several may have
        // the same LOCAL_RANK.
        let job = launcher::Start::Job(launcher::Rendezvous { local_rank: None, ..job });
        Self::new(process::start(&control, &job)?.into_comm(), device, options)
    }

    fn make(control: Arc<dyn Collective>, device: usize, options: &NcclOptions) -> Result<Self, NcclError> {
        const WHAT: &str = "creating a communicator";
        let library = library::library()?;
        let version = library.version()?;
        let device = Device::open(device)?;
        let mine = Identity::of_this_process(&device, version);
        let gathered = control.execute_for(Request::AllGather(Buffer::U8(mine.encode())), WHAT)?.into_u8();
        let (rank, world) = (control.rank(), control.world());
        let read = |bytes: &[u8]| serde_json::from_slice(bytes.trim_ascii()).unwrap_or_else(|_| mine.clone());
        let all: Vec<Identity> = gathered.chunks_exact(IDENTITY).map(read).collect();
        compare(&all)?;

        let _entered = device.enter()?;
        let mut id = ncclUniqueId { internal: [0; 128] };
        if rank == 0 {
            // SAFETY: the pointer is to a local.
            library.check("ncclGetUniqueId", unsafe { (library.get_unique_id)(&raw mut id) })?;
        }
        let bytes = id.internal.iter().map(|&byte| byte as u8).collect();
        let bytes = control.execute_for(Request::Broadcast(Buffer::U8(bytes), 0), WHAT)?.into_u8();
        id.internal.iter_mut().zip(bytes).for_each(|(to, from)| *to = from as _);

        let context_events = options.context_events && device.context_events;
        let identity = child_id(0, 0, 0x6e63_636c);
        let core = Core::new(
            (library, &device),
            (control, identity),
            options.deadline,
            Arc::default(),
            options.high_priority,
        )?;
        let at = core.group.at(0, &"the creation of the communicator");
        let mut comm: ncclComm_t = std::ptr::null_mut();
        let mut config = library::non_blocking(version);
        // SAFETY: the pointers are to locals, read during the call only; the context of the rank's device is current.
        let code = unsafe { (library.init)(&raw mut comm, world as i32, id, rank as i32, &raw mut config) };
        library.check("ncclCommInitRankConfig", code)?;
        core.until_done(comm, at).inspect_err(|_| discard(&core, comm))?;
        core.handle.lock().0 = Some(comm);
        Ok(Self { inner: Inner::new(core, context_events, options.high_priority)? })
    }

    /// Splits the communicator: ranks that pass the same `color` form one, in the order of their ranks, on a control group that is
    /// split alike ([`Collective::split`]). A collective operation of this communicator and of the control group. Operations issued
    /// before complete first.
    ///
    /// # Errors
    ///
    /// [`CommError`], as for any collective.
    pub fn split(&self, label: &str, color: u64) -> Result<Self, CommError> {
        let Inner { core, context_events, high_priority, .. } = &*self.inner;
        let ((_order, seq), op) = (core.next(), format!("split into '{label}'"));
        let at = core.group.at(seq, &op);
        core.sound()?;
        let control = core.control.split(label, color).map_err(|error| core.fault(error))?;

        // The library requires that the parent has no operation in progress meanwhile.
        while core.busy() {
            core.poll()?;
            std::thread::sleep(Duration::from_micros(100));
        }
        let failed = |error: NcclError| core.fault(at.device(error));
        let _entered = core.device.enter().map_err(failed)?;
        // Colors of the library are small numbers: the first rank of each part identifies it.
        let (color, key) = (control.members()[0], control.rank());
        let (made, id) = ((core.library, &core.device), child_id(core.group.id, seq, color as u64 + 1));
        let child = Core::new(made, (control, id), core.deadline, core.wire.clone(), *high_priority).map_err(failed)?;
        let mut comm: ncclComm_t = std::ptr::null_mut();
        {
            let handle = core.handle.lock();
            let Some(parent) = handle.0 else { return Err(at.device("the communicator has already been closed")) };
            // SAFETY: the parent is alive while the handle is locked, and the pointer to a local that lives until the call
            // has ended, which is waited for; without a configuration the child has its parent's.
            let code =
                unsafe { (core.library.split)(parent, color as i32, key as i32, &raw mut comm, std::ptr::null_mut()) };
            core.library.check("ncclCommSplit", code).map_err(failed)?;
            core.until_done(parent, at)?;
            if comm.is_null() {
                return Err(failed(NcclError::Call {
                    call: "ncclCommSplit",
                    reason: "it returned no communicator".into(),
                }));
            }
            core.until_done(comm, at).inspect_err(|_| discard(core, comm))?;
        }
        child.handle.lock().0 = Some(comm);
        Ok(Self { inner: Inner::new(child, *context_events, *high_priority).map_err(failed)? })
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
        let error = compare(&[other, a.clone(), a.clone()]).unwrap_err().to_string();
        assert!(error.starts_with("ranks 1 and 2 both use the GPU at 0:1 of machine a-name"), "{error}");
        let error = compare(&[a, identity("a", "0:2", 21_805)]).unwrap_err().to_string();
        assert_eq!(error, "rank 1 has NCCL 2.18.5, but rank 0 has 2.23.4: install the same version for all ranks");
        assert_eq!(b.encode().len(), IDENTITY);
    }

    /// Follows NCCL: <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-hostid>.
    #[test]
    fn host_ids_make_hosts_of_processes_on_one_machine() {
        let of = |host_id: Option<&str>| {
            let mut identity = identity("a", "0:1", 22_304);
            identity.machine = on_host(identity.machine, host_id.map(String::from));
            identity
        };
        assert!(compare(&[of(None), of(Some(""))]).is_err());
        assert!(compare(&[of(Some("rank-0")), of(Some("rank-0"))]).is_err());
        compare(&[of(Some("rank-0")), of(Some("rank-1")), of(None)]).unwrap();
        assert_eq!(of(Some(&"x".repeat(1000))).encode().len(), IDENTITY);
        assert!(serde_json::from_slice::<Identity>(&of(Some(&"x".repeat(1000))).encode()).is_ok());
    }
}
