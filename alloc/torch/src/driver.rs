//! Pages and events of the CUDA driver, which is looked for when the first device is used.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use crate::pages::{Event, Pages, PagesError, StreamHandle};

/// `CUmemLocation`, as `cuda.h` declares it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

const OUT_OF_MEMORY: c_uint = 2;
const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
const READ_WRITE: c_int = 3;
const WITHOUT_TIMING: c_uint = 2;

macro_rules! driver {
    ($($field:ident = $name:literal ($($argument:ty),*);)*) => {
        /// Functions of `libcuda`, by the names that its headers give them.
        struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> c_uint,)*
            can_access_peer: Option<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_uint>,
            _library: libloading::Library,
        }

        impl Driver {
            fn load() -> Result<Self, libloading::Error> {
                // SAFETY: libcuda's initializers have no preconditions. The types are those of `cuda.h`, and the
                // functions live as long as the library, which the struct has.
                unsafe {
                    let library = libloading::Library::new("libcuda.so.1")?;
                    Ok(Self {
                        $($field: *library.get(concat!($name, "\0").as_bytes())?,)*
                        can_access_peer: library.get(b"cuDeviceCanAccessPeer\0").ok().map(|function| *function),
                        _library: library,
                    })
                }
            }
        }
    };
}

driver! {
    init = "cuInit" (c_uint);
    count = "cuDeviceGetCount" (*mut c_int);
    device = "cuDeviceGet" (*mut c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    push = "cuCtxPushCurrent_v2" (*mut c_void);
    pop = "cuCtxPopCurrent_v2" (*mut *mut c_void);
    synchronize = "cuCtxSynchronize" ();
    info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    granularity = "cuMemGetAllocationGranularity" (*mut usize, *const Properties, c_int);
    reserve = "cuMemAddressReserve" (*mut u64, usize, usize, u64, c_ulonglong);
    create = "cuMemCreate" (*mut u64, usize, *const Properties, c_ulonglong);
    release = "cuMemRelease" (u64);
    map = "cuMemMap" (u64, usize, usize, u64, c_ulonglong);
    unmap = "cuMemUnmap" (u64, usize);
    set_access = "cuMemSetAccess" (u64, usize, *const Access, usize);
    event_create = "cuEventCreate" (*mut *mut c_void, c_uint);
    event_record = "cuEventRecord" (*mut c_void, *mut c_void);
    event_query = "cuEventQuery" (*mut c_void);
    event_wait = "cuEventSynchronize" (*mut c_void);
    event_destroy = "cuEventDestroy_v2" (*mut c_void);
}

fn result(call: &'static str, code: c_uint) -> Result<(), PagesError> {
    match code {
        0 => Ok(()),
        OUT_OF_MEMORY => Err(PagesError::OutOfMemory),
        code => Err(PagesError::Driver { call, code }),
    }
}

/// The pages of a CUDA device.
pub struct CudaPages {
    driver: &'static Driver,
    device: c_int,
    /// The device's primary context as an address.
    context: usize,
    page: u64,
    /// This device first, then those whose kernels can access its memory.
    access: Vec<Access>,
    /// Handles of mapped pages, by the page's number after `base`.
    handles: Vec<u64>,
    base: u64,
    spare: Vec<u64>,
}

impl CudaPages {
    /// Opens a device.
    ///
    /// # Errors
    /// Returns [`PagesError::Missing`] without a driver, or the driver's error.
    pub fn new(ordinal: c_int) -> Result<Self, PagesError> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let driver = DRIVER.get_or_init(|| Driver::load().map_err(|error| error.to_string()));
        let driver = driver.as_ref().map_err(|error| PagesError::Missing(error.clone()))?;
        let (mut device, mut context, mut page) = (0, std::ptr::null_mut(), 0);
        // SAFETY: the calls only write the variables that they are given.
        unsafe {
            result("cuInit", (driver.init)(0))?;
            result("cuDeviceGet", (driver.device)(&mut device, ordinal))?;
            result("cuDevicePrimaryCtxRetain", (driver.retain)(&mut context, device))?;
            let call = (driver.granularity)(&mut page, &properties(device), 0);
            result("cuMemGetAllocationGranularity", call)?;
        }
        let (page, context) = ((page as u64).max(1), context as usize);
        let access = std::iter::once(device).chain(peers(driver, device)).map(access).collect();
        Ok(Self { driver, device, context, page, access, handles: Vec::new(), base: 0, spare: Vec::new() })
    }

    /// Calls the driver with the device's context current, as events and queries of memory need it.
    fn within<T>(&self, call: impl FnOnce(&Driver) -> T) -> T {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the context is retained for as long as the process lives, and what is pushed is popped.
        unsafe { (self.driver.push)(self.context as *mut c_void) };
        let value = call(self.driver);
        // SAFETY: as above; the call only writes `popped`.
        unsafe { (self.driver.pop)(&mut popped) };
        value
    }

    /// A page's memory: one that was set aside, or a new one.
    fn handle(&mut self) -> Result<u64, PagesError> {
        if let Some(handle) = self.spare.pop() {
            return Ok(handle);
        }
        let mut handle = 0;
        // SAFETY: the call only writes `handle`.
        let call = unsafe { (self.driver.create)(&mut handle, self.page as usize, &properties(self.device), 0) };
        result("cuMemCreate", call).map(|()| handle)
    }

    fn index(&self, address: u64) -> usize {
        ((address - self.base) / self.page) as usize
    }

    fn unmap_pages(&mut self, address: u64, bytes: u64) {
        // SAFETY: whole pages of this range are mapped here, and the caller has waited for the work that uses them.
        unsafe { (self.driver.unmap)(address, bytes as usize) };
        let (first, end) = (self.index(address), self.index(address + bytes));
        self.spare.extend(self.handles[first..end].iter_mut().map(std::mem::take));
    }
}

/// The devices whose kernels can access this one's memory.
fn peers(driver: &Driver, device: c_int) -> Vec<c_int> {
    let Some(can_access) = driver.can_access_peer else { return Vec::new() };
    let mut count = 0;
    // SAFETY: the call only writes `count`.
    if unsafe { (driver.count)(&mut count) } != 0 {
        return Vec::new();
    }
    let peer = |ordinal| {
        let (mut peer, mut can) = (0, 0);
        // SAFETY: the calls only write `peer` and `can`.
        let code = unsafe { (driver.device)(&mut peer, ordinal) };
        // SAFETY: as above.
        let known = code == 0 && peer != device && unsafe { can_access(&mut can, peer, device) } == 0;
        (known && can != 0).then_some(peer)
    };
    (0..count).filter_map(peer).collect()
}

fn access(device: c_int) -> Access {
    Access { location: Location { kind: ON_DEVICE, id: device }, flags: READ_WRITE }
}

fn properties(device: c_int) -> Properties {
    let location = Location { kind: ON_DEVICE, id: device };
    Properties { kind: PINNED, handle_types: 0, location, win32: std::ptr::null_mut(), flags: [0; 8] }
}

impl Pages for CudaPages {
    fn page(&self) -> u64 {
        self.page
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64, PagesError> {
        let mut address = 0;
        // SAFETY: the call only writes `address`.
        let call = unsafe { (self.driver.reserve)(&mut address, bytes as usize, 0, 0, 0) };
        result("cuMemAddressReserve", call)?;
        (self.base, self.handles) = (address, vec![0; (bytes / self.page) as usize]);
        Ok(address)
    }

    fn map(&mut self, address: u64, bytes: u64) -> Result<(), PagesError> {
        for start in (address..address + bytes).step_by(self.page as usize) {
            let mapped = self.handle().and_then(|handle| {
                // SAFETY: the address is reserved, and nothing is mapped there.
                let call = unsafe { (self.driver.map)(start, self.page as usize, 0, handle, 0) };
                result("cuMemMap", call).map(|()| handle).inspect_err(|_| self.spare.push(handle))
            });
            match mapped {
                Ok(handle) => {
                    let index = self.index(start);
                    self.handles[index] = handle;
                }
                Err(error) => {
                    if start > address {
                        self.unmap_pages(address, start - address);
                    }
                    return Err(error);
                }
            }
        }
        // SAFETY: the whole range has just been mapped, and the pointer is to as many entries as the last argument says.
        let set = |entries: &[Access]| unsafe {
            (self.driver.set_access)(address, bytes as usize, entries.as_ptr(), entries.len())
        };
        let mut code = set(&self.access);
        if code != 0 && self.access.len() > 1 {
            // A peer that refuses must not keep the device from its own memory.
            code = set(&self.access[..1]);
            if code == 0 {
                self.access.truncate(1);
            }
        }
        result("cuMemSetAccess", code).inspect_err(|_| self.unmap_pages(address, bytes))
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        self.unmap_pages(address, bytes);
    }

    fn trim(&mut self) {
        for handle in self.spare.drain(..) {
            // SAFETY: the handle comes from cuMemCreate, and is not mapped.
            unsafe { (self.driver.release)(handle) };
        }
    }

    fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call only writes `free` and `total`.
        self.within(|driver| unsafe { (driver.info)(&mut free, &mut total) });
        (free as u64, total as u64)
    }

    /// Without an event (a stream that is being captured, or one that no longer exists), the device is waited for.
    fn record(&mut self, stream: StreamHandle) -> Event {
        let mut event = std::ptr::null_mut();
        // SAFETY: the stream's handle comes from the caller of the C interface; `event` is written before it is used.
        self.within(|driver| unsafe {
            if (driver.event_create)(&mut event, WITHOUT_TIMING) != 0
                || (driver.event_record)(event, stream as *mut c_void) != 0
            {
                (driver.synchronize)();
                if !event.is_null() {
                    (driver.event_destroy)(event);
                }
                event = std::ptr::null_mut();
            }
        });
        Event(event as u64)
    }

    fn is_done(&mut self, event: Event) -> bool {
        // SAFETY: the event was recorded here and is destroyed once.
        let done = event.0 == 0 || self.within(|driver| unsafe { (driver.event_query)(event.0 as *mut c_void) }) == 0;
        if done {
            self.forget(event);
        }
        done
    }

    fn forget(&mut self, event: Event) {
        if event.0 != 0 {
            // SAFETY: the event was recorded here and is destroyed once.
            self.within(|driver| unsafe { (driver.event_destroy)(event.0 as *mut c_void) });
        }
    }

    fn wait(&mut self, event: Event) {
        if event.0 != 0 {
            // SAFETY: the event was recorded here and is destroyed once, by `forget`.
            self.within(|driver| unsafe { (driver.event_wait)(event.0 as *mut c_void) });
            self.forget(event);
        }
    }
}
