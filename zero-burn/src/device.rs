//! The device of [`Zero`](crate::Zero): the inner device and the rank's place.

use burn_backend::{DeviceId, DeviceOps};
use burn_std::device::Device;

use crate::current;

/// Bits of a [`DeviceId`]'s index that hold the inner device's index; the bits above hold the rank.
const INNER_BITS: u16 = 8;

/// An inner device as one rank sees it.
///
/// `Default` is the inner device that the launch has assigned to the current thread's rank; outside of a launch, the default inner device
/// as rank 0. So a program written for one device runs unchanged.
#[derive(Clone, Debug)]
pub struct ZeroDevice<D> {
    inner: D,
    rank: usize,
    /// Identifies the rank among those of all launches, for threads that are not the rank's own; 0 outside of a launch.
    place: u64,
}

/// Ignores `place`: successive launches use the same devices.
impl<D: PartialEq> PartialEq for ZeroDevice<D> {
    fn eq(&self, other: &Self) -> bool {
        self.inner == other.inner && self.rank == other.rank
    }
}

impl<D: Eq> Eq for ZeroDevice<D> {}

impl<D> ZeroDevice<D> {
    /// Returns `inner` as the current thread's rank sees it.
    pub fn here(inner: D) -> Self {
        let (rank, place) = current::current_place();
        Self { inner, rank, place }
    }

    pub(crate) fn place(&self) -> u64 {
        self.place
    }

    /// Returns the inner backend's device.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Returns the rank that owns this device.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl<D: Default + Clone + 'static> Default for ZeroDevice<D> {
    fn default() -> Self {
        Self::here(current::current_device().unwrap_or_default())
    }
}

impl<D: DeviceOps> Device for ZeroDevice<D> {
    fn from_id(id: DeviceId) -> Self {
        let inner = D::from_id(DeviceId { type_id: id.type_id, index_id: id.index_id & ((1 << INNER_BITS) - 1) });
        Self { inner, rank: usize::from(id.index_id >> INNER_BITS), place: 0 }
    }

    fn to_id(&self) -> DeviceId {
        let DeviceId { type_id, index_id } = self.inner.to_id();
        // Burn uses this identity for its table of default types, which are the same on every rank. So it does no harm that ranks above 255
        // share numbers.
        DeviceId { type_id, index_id: index_id | ((self.rank as u16) << INNER_BITS) }
    }
}

impl<D: DeviceOps> DeviceOps for ZeroDevice<D> {}
