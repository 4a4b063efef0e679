//! A rank's end of a control group.

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::flight::{Opening, Recorder};
use super::super::launcher::Rendezvous;
use super::super::operation::{Description, Place, child_id, received};
use super::super::progress::Progress;
use super::super::{Buffer, Collective, Join, Joined, Pending, ReduceOp, Request};
use super::hub::Part;
use super::join::{self, RendezvousError};
use super::shared::{Answer, At, Link, Shared};
use super::wire::{self, Head, Trouble, Work, code_of};
use super::{MAX_BYTES, TcpOptions};
use crate::CommError;
use crate::accounting::WireCounter;

/// How often the hub looks at deadlines.
const WATCH: Duration = Duration::from_millis(20);
/// How long a rank that ends waits for the others to end, so that their last operations find the hub.
const LEAVE: Duration = Duration::from_secs(10);
/// How long the ends of a connection wait for one another.
const CLOSE: Duration = Duration::from_secs(1);

/// One rank's end of a control group. See the [module](super) for what it is for.
pub struct TcpComm {
    inner: Arc<Inner>,
    progress: OnceLock<Progress>,
}

#[derive(Debug)]
struct Inner {
    id: u64,
    label: Arc<str>,
    /// The group's ranks in the run, ascending.
    members: Arc<[usize]>,
    /// This rank's place among them.
    me: usize,
    next: AtomicU64,
    connections: Arc<Connections>,
}

/// The connections of a rank and the threads that read from them; closed with the last communicator.
#[derive(Debug)]
struct Connections {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl core::fmt::Debug for TcpComm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "TcpComm({} of {}, '{}')", self.inner.me, self.inner.members.len(), self.inner.label)
    }
}

/// Connects this process with the other ranks of its job, and returns when all have come. A collective: every process
/// calls it, once.
///
/// # Errors
///
/// [`RendezvousError`], each with what to change.
pub fn connect(place: &Rendezvous, options: &TcpOptions) -> Result<Arc<TcpComm>, RendezvousError> {
    let Rendezvous { rank, world, local_rank, .. } = *place;
    let begin = Instant::now();
    let streams = match (world, rank) {
        (1, _) => Vec::new(),
        (_, 0) => join::listen(place, options.deadline)?,
        _ => vec![join::join(place, options.deadline)?],
    };
    let refused = |reason: String| {
        let (host, port) = (place.host.clone(), place.port);
        RendezvousError::Refused { rank, host, port, reason }
    };
    let peer_of = |i: usize| if rank == 0 { i + 1 } else { 0 };
    let mut links = Vec::new();
    for (i, stream) in streams.iter().enumerate() {
        links.push(Link::new(peer_of(i), stream.try_clone().map_err(|error| refused(error.to_string()))?));
    }
    if rank == 0 {
        links.iter().for_each(|link| link.send(&Head::Go, &[]));
    } else if let Some(mut stream) = streams.first() {
        let left = (options.deadline + CLOSE).saturating_sub(begin.elapsed()).max(CLOSE);
        let go = stream.set_read_timeout(Some(left)).and_then(|()| wire::receive(&mut stream, world));
        if !matches!(go, Ok(Some((Head::Go, _)))) {
            let why = "rank 0 ended, or gave up, before all ranks had connected; its own error says which are missing";
            return Err(refused(why.into()));
        }
        stream.set_read_timeout(None).map_err(|error| refused(error.to_string()))?;
    }
    let recorder = Recorder::new(rank, world, options.flight_dir.clone());
    let local_rank = local_rank.unwrap_or(rank);
    let shared = Shared::new((rank, world, local_rank), options.deadline, recorder, links);
    let connections = Connections { shared: shared.clone(), threads: Mutex::default() };
    for (i, stream) in streams.into_iter().enumerate() {
        let (peer, shared) = (peer_of(i), shared.clone());
        let name = if rank == 0 { format!("rank-0-tcp-from-{peer}") } else { format!("rank-{rank}-tcp") };
        connections.spawn(name, move || read(&shared, peer, stream))?;
    }
    if rank == 0 && world > 1 {
        connections.spawn("rank-0-tcp-watch".into(), move || watch(&shared))?;
    }
    let members = (0..world).collect();
    Ok(TcpComm::new(Arc::new(connections), 0, "world", members))
}

/// Reads what `peer` sends until its connection ends.
fn read(shared: &Shared, peer: usize, mut stream: TcpStream) {
    let lost = loop {
        let (head, payload) = match wire::receive(&mut stream, shared.world) {
            Ok(Some(message)) => message,
            Ok(None) => break "it closed its connection: its process has ended".to_string(),
            Err(error) => break format!("its connection was lost ({error}): has its process, or its machine, ended?"),
        };
        match (head, &shared.hub) {
            (Head::Part { slot, label, members, op, work, dtype }, Some(hub)) => {
                match wire::buffer_of(dtype, payload) {
                    Ok(buffer) => hub.arrive(shared, peer, Part { slot, label, members, op, work, buffer }),
                    Err(error) => break error.to_string(),
                }
            }
            (Head::Result { slot, dtype }, None) => match wire::buffer_of(dtype, payload) {
                Ok(buffer) => shared.deliver(slot, Answer::Result(buffer)),
                Err(error) => break error.to_string(),
            },
            (Head::Without { slot, peer }, None) => shared.deliver(slot, Answer::Without(peer)),
            (Head::Abort(trouble), _) if trouble.peer < shared.world => shared.note(trouble, Some(peer)),
            (Head::Bye(who), hub) if who < shared.world => {
                shared.leave(who);
                if let Some(hub) = hub {
                    hub.leave(shared, who);
                    let others = shared.links.iter().filter(|link| link.peer != who);
                    others.for_each(|link| link.send(&Head::Bye(who), &[]));
                }
            }
            (head, _) => break format!("it sent what does not belong here: {head:?}"),
        }
    };
    // After a goodbye, or a failure, the end of a connection is what was to come.
    if !shared.has_left(peer) {
        shared.note(Trouble { peer, reason: lost, cause: None }, Some(peer));
    }
    shared.cut(peer);
    // The other end waits for this one.
    let _ = stream.shutdown(Shutdown::Both);
}

/// On the hub: looks at deadlines until the run is over.
fn watch(shared: &Shared) {
    let everyone = |shared: &Shared| (0..shared.world).all(|rank| shared.has_left(rank));
    while let Some(hub) = &shared.hub
        && !shared.failed()
        && !everyone(shared)
        && !shared.has_left(0)
    {
        hub.watch(shared, shared.deadline);
        std::thread::sleep(WATCH);
    }
}

impl Connections {
    fn spawn(&self, name: String, work: impl FnOnce() + Send + 'static) -> Result<(), RendezvousError> {
        let rank = self.shared.rank;
        let spawned = std::thread::Builder::new().name(name).spawn(work);
        self.threads.lock().push(spawned.map_err(|source| RendezvousError::Thread { rank, source })?);
        Ok(())
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        let shared = &self.shared;
        if std::thread::panicking() {
            shared.fail("it panicked", None);
        }
        if let Some(trouble) = shared.trouble() {
            // The thread that found it may not have told everybody yet, and a goodbye must not come first.
            shared.links.iter().for_each(|link| link.send(&Head::Abort(trouble.clone()), &[]));
        }
        if shared.rank == 0 {
            for link in &shared.links {
                link.send(&Head::Bye(0), &[]);
            }
            if let Some(hub) = &shared.hub {
                shared.leave(0);
                hub.leave(shared, 0);
            }
            // Operations of the other ranks among themselves go through here.
            shared.wait_for_leavers(LEAVE.min(shared.deadline));
            shared.links.iter().for_each(|link| link.shutdown(Shutdown::Both));
        } else {
            for link in &shared.links {
                link.send(&Head::Bye(shared.rank), &[]);
                link.shutdown(Shutdown::Write);
            }
        }
        let end = Instant::now() + CLOSE;
        let mut threads = self.threads.lock();
        while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Whoever still reads has nothing to read any more.
        shared.leave(shared.rank);
        shared.links.iter().for_each(|link| {
            shared.leave(link.peer);
            link.shutdown(Shutdown::Both);
        });
        let me = std::thread::current().id();
        for thread in threads.drain(..).filter(|thread| thread.thread().id() != me) {
            // A panic of a reading thread ends what it read for; nothing is left to be done about it here.
            let _ = thread.join();
        }
        shared.recorder.finish(CLOSE);
    }
}

impl Inner {
    fn shared(&self) -> &Arc<Shared> {
        &self.connections.shared
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.iter().copied().filter(|&member| member != self.shared().rank)
    }

    fn run(&self, request: Request, what: &str) -> Result<Buffer, CommError> {
        // Relaxed: a communicator's operations are issued by one thread at a time (its user or its progress thread).
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let (world, shared) = (self.members.len(), self.shared());
        let _span = tracing::trace_span!("collective", op = request.name(), group = %self.label, seq).entered();
        let place = Place { group: &self.label, seq, rank: shared.rank, world };
        place.check(&request)?;
        let received = received(&request, self.me, world);
        let op = Description::of_request(&request, what).to_string();
        let (work, buffer) = Work::of(request);
        if buffer.bytes() > MAX_BYTES {
            return Err(CommError::Shape {
                group: self.label.to_string(),
                seq,
                rank: shared.rank,
                op,
                expected: format!("at most {MAX_BYTES} bytes in a control group (bulk goes by another engine)"),
                got: format!("{} bytes", buffer.bytes()),
            });
        }
        let entry = shared.recorder.open(Opening {
            group: &self.label,
            group_id: self.id,
            seq,
            op: op.clone(),
            bytes: received.map_or(0, |(_, bytes)| bytes),
            one_sided: false,
            waiting_for: self.others().collect(),
            last: true,
        });
        let result = self.exchange(seq, &op, work, buffer);
        shared.recorder.close(&entry, result.as_ref().map(|_| ()).map_err(CommError::to_string));
        if let (Ok(_), Some((kind, bytes))) = (&result, received) {
            shared.wire.add(kind, bytes);
        }
        result
    }

    fn exchange(&self, seq: u64, op: &str, work: Work, buffer: Buffer) -> Result<Buffer, CommError> {
        let (shared, slot) = (self.shared(), (self.id, seq));
        let at = At { group: &self.label, seq, op };
        shared.check(at, &[])?;
        let (label, members, op) = (self.label.to_string(), self.members.to_vec(), op.to_string());
        match &shared.hub {
            Some(hub) => hub.arrive(shared, shared.rank, Part { slot, label, members, op, work, buffer }),
            None => {
                let head = Head::Part { slot, label, members, op, work, dtype: code_of(buffer.dtype()) };
                shared.links[0].send(&head, buffer.as_bytes());
            }
        }
        shared.wait(slot, at)
    }
}

impl TcpComm {
    fn new(connections: Arc<Connections>, id: u64, label: &str, members: Arc<[usize]>) -> Arc<Self> {
        let rank = connections.shared.rank;
        let me = members.iter().position(|&member| member == rank).expect("a rank builds groups that it belongs to");
        let inner = Inner { id, label: label.into(), members, me, next: AtomicU64::new(0), connections };
        Arc::new(Self { inner: Arc::new(inner), progress: OnceLock::new() })
    }

    fn progress(&self) -> &Progress {
        let Inner { label, .. } = &*self.inner;
        self.progress.get_or_init(|| Progress::spawn(format!("rank-{}-{label}", self.inner.shared().rank)))
    }

    /// The ranks of the run that belong to this group, in the order of the group.
    pub fn members(&self) -> &[usize] {
        &self.inner.members
    }

    /// Groups of the ranks that pass the same `color`, in the order of their ranks. A collective of this group.
    ///
    /// # Errors
    ///
    /// As any collective's.
    pub fn split(&self, label: &str, color: u64) -> Result<Arc<Self>, CommError> {
        let colors = self.execute(Request::AllGather(Buffer::U8(color.to_le_bytes().to_vec())))?.into_u8();
        let seq = self.inner.next.load(Ordering::Relaxed);
        let same = colors.chunks_exact(8).zip(self.inner.members.iter()).filter(|(of, _)| **of == color.to_le_bytes());
        let members = same.map(|(_, &rank)| rank).collect();
        let id = child_id(self.inner.id, seq, color.wrapping_add(1));
        Ok(Self::new(self.inner.connections.clone(), id, label, members))
    }
}

impl Collective for TcpComm {
    fn rank(&self) -> usize {
        self.inner.me
    }

    fn world(&self) -> usize {
        self.inner.members.len()
    }

    fn local_rank(&self) -> usize {
        self.inner.shared().local_rank
    }

    fn label(&self) -> &str {
        &self.inner.label
    }

    fn wire(&self) -> &Arc<WireCounter> {
        &self.inner.shared().wire
    }

    fn execute_for(&self, request: Request, what: &str) -> Result<Buffer, CommError> {
        match self.progress.get() {
            // Order is kept by going through the same queue.
            Some(_) => self.start_for(request, what).wait(),
            None => self.inner.run(request, what),
        }
    }

    fn start_for(&self, request: Request, what: &str) -> Pending {
        let (inner, what) = (self.inner.clone(), what.to_string());
        self.progress().start(move || inner.run(request, &what))
    }

    fn start_shared(&self, input: Buffer, op: ReduceOp, what: &str, join: Join) -> Pending<Joined> {
        let (inner, what) = (self.inner.clone(), what.to_string());
        // This process has one rank, which shares with nobody.
        self.progress().start(move || Ok(join(&[Arc::new(inner.run(Request::AllReduce(input, op), &what)?)])))
    }

    fn duplicate(&self, label: &str) -> Result<Arc<dyn Collective>, CommError> {
        self.barrier()?;
        // Every rank has passed the same barrier, so its sequence number names this duplication on all of them.
        let seq = self.inner.next.load(Ordering::Relaxed);
        let id = child_id(self.inner.id, seq, 0);
        Ok(Self::new(self.inner.connections.clone(), id, label, self.inner.members.clone()))
    }

    fn abort(&self, reason: &str) {
        self.inner.shared().fail(reason, None);
    }

    fn deadline(&self) -> Duration {
        self.inner.shared().deadline
    }

    fn recorder(&self) -> &Recorder {
        &self.inner.shared().recorder
    }

    fn check(&self, group: &str, seq: u64, op: &str) -> Result<(), CommError> {
        let others: Vec<usize> = self.inner.others().collect();
        self.inner.shared().check(At { group, seq, op }, &others)
    }
}
