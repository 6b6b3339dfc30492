"""broker.conf as RocketMQ reads it: the syntax of a Java properties file, and every key of MessageStoreConfig.

The store uses some of the keys (storage/config.py). The others are listed so that a broker.conf can be told apart
from a typing mistake: 78 keys of 4.9.8, 182 of 5.3.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from brokerlab.storage.errors import ConfigError
from brokerlab.storage.quirks import Dialect

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
ALLOWED_BOOLEANS = "true or false"

# What Java's String.trim removes; RocketMQ trims every value.
JAVA_BLANK = "".join(map(chr, range(0x21)))

# Columns, two blanks apart: key, type (int, long, double, boolean, string, enum), default of 4.9, default of 5.3.
# `=` the same, `null` no value, `-` no such key, `(x)` no such key but the version behaves as if it were x.
_TABLE = """
storePathRootDir  s  ~/store  =
storePathCommitLog  s  null  =
storePathDLedgerCommitLog  s  null  =
storePathEpochFile  s  -  null
storePathBrokerIdentity  s  -  null
readOnlyCommitLogStorePaths  s  null  =
storeType  s  -  default
mappedFileSizeCommitLog  i  1073741824  =
mappedFileSizeConsumeQueue  i  6000000  =
mapperFileSizeBatchConsumeQueue  i  -  13800000
enableConsumeQueueExt  b  false  =
mappedFileSizeConsumeQueueExt  i  50331648  =
bitMapLengthConsumeQueueExt  i  64  =
maxHashSlotNum  i  5000000  =
maxIndexNum  i  20000000  =
warmMapedFileEnable  b  false  =
flushLeastPagesWhenWarmMapedFile  i  4096  =
writeWithoutMmap  b  -  -

maxMessageSize  i  4194304  =
maxFilterMessageSize  i  (16000)  16000
maxTopicLength  i  -  127
autoMessageVersionOnTopicLen  b  (false)  true
enabledAppendPropCRC  b  (false)  false
forceVerifyPropCRC  b  (false)  false
maxChecksumRange  l  -  1073741824
useReentrantLockWhenPutMessage  b  true  =
useABSLock  b  -  false
spinLockCollisionRetreatOptimalDegree  i  -  1000
topicQueueLockNum  i  -  32
putMessageTimeout  i  -  8000
maxAsyncPutMessageRequests  i  -  5000
putMsgIndexHightWater  i  600000  =
osPageCacheBusyTimeOutMills  l  1000  =
debugLockEnable  b  false  =
diskFallRecorded  b  true  =
duplicationEnable  b  false  =
enableBatchPush  b  false  =
enableLmq  b  false  =
enableMultiDispatch  b  false  =
maxLmqConsumeQueueNum  i  20000  =

transientStorePoolEnable  b  false  =
transientStorePoolSize  i  5  =
fastFailIfNoBufferInStorePool  b  false  =
commitIntervalCommitLog  i  200  =
commitCommitLogLeastPages  i  4  =
commitCommitLogThoroughInterval  i  200  =
wakeCommitWhenPutMessage  b  (true)  true
readUnCommitted  b  (false)  false

flushDiskType  e  ASYNC_FLUSH  =
syncFlushTimeout  i  5000  =
flushCommitLogTimed  b  true  =
flushIntervalCommitLog  i  500  =
flushCommitLogLeastPages  i  4  =
flushCommitLogThoroughInterval  i  10000  =
wakeFlushWhenPutMessage  b  (true)  false
enableRunningFlagsInFlush  b  -  -
flushIntervalConsumeQueue  i  1000  =
flushConsumeQueueLeastPages  i  2  =
flushConsumeQueueThoroughInterval  i  60000  =

dispatchFromSenderThread  b  -  false
dispatchCqThreads  i  -  10
dispatchCqCacheNum  i  -  4096
enableAsyncReput  b  -  true
recheckReputOffsetFromCq  b  (true)  false
enableBuildConsumeQueueConcurrently  b  -  false
batchDispatchRequestThreadPoolNums  i  -  16
putConsumeQueueDataByFileChannel  b  -  true
maxRecoveryCommitlogFiles  i  -  30
checkCRCOnRecover  b  true  =

maxTransferBytesOnMessageInMemory  i  262144  =
maxTransferCountOnMessageInMemory  i  32  =
maxTransferBytesOnMessageInDisk  i  65536  =
maxTransferCountOnMessageInDisk  i  8  =
accessMessageInMemoryMaxRatio  i  40  =
accessMessageInMemoryHotRatio  i  -  26
travelCqFileNumWhenGetMessage  i  -  1
pullBatchMaxMessageCount  i  -  160
maxConsumeQueueScan  i  -  20000
sampleCountThreshold  i  -  5000
sampleSteps  i  -  32
searchBcqByCacheEnable  b  -  true
messageIndexEnable  b  true  =
messageIndexSafe  b  false  =
maxMsgsNumBatch  i  64  =
defaultQueryMaxNum  i  32  =

cleanResourceInterval  i  10000  =
deleteCommitLogFilesInterval  i  100  =
deleteConsumeQueueFilesInterval  i  100  =
destroyMapedFileIntervalForcibly  i  120000  =
redeleteHangedFileInterval  i  120000  =
deleteWhen  s  04  =
diskMaxUsedSpaceRatio  i  75  =
diskSpaceWarningLevelRatio  i  (90)  90
diskSpaceCleanForciblyRatio  i  (85)  85
logicalDiskSpaceCleanForciblyThreshold  d  -  0.8
replicasPerDiskPartition  i  -  1
fileReservedTime  i  72  =
deleteFileBatchMax  i  (10)  10
maxBatchDeleteFilesNum  i  -  50
cleanFileForciblyEnable  b  true  =
enableCleanExpiredOffset  b  -  false
correctLogicMinOffsetSleepInterval  i  -  1
correctLogicMinOffsetForceInterval  i  -  300000

mappedFileSwapEnable  b  -  true
commitLogForceSwapMapInterval  l  -  43200000
commitLogSwapMapInterval  l  -  3600000
commitLogSwapMapReserveFileNum  i  -  100
logicQueueForceSwapMapInterval  l  -  43200000
logicQueueSwapMapInterval  l  -  3600000
logicQueueSwapMapReserveFileNum  i  -  20
cleanSwapedMapInterval  l  -  300000
dataReadAheadEnable  b  -  true
coldDataFlowControlEnable  b  -  false
coldDataScanEnable  b  -  false

brokerRole  e  ASYNC_MASTER  =
slaveTimeout  i  3000  =
offsetCheckInSlave  b  false  =
haListenPort  i  10912  =
haSendHeartbeatInterval  i  5000  =
haHousekeepingInterval  i  20000  =
haTransferBatchSize  i  32768  =
haMasterAddress  s  null  =
haMaxGapNotInSync  i  268435456  =
haMaxTimeSlaveNotCatchup  l  -  15000
haFlowControlEnable  b  -  false
maxHaTransferByteInSecond  l  -  104857600
maxSlaveResendLength  l  -  268435456
syncMasterFlushOffsetWhenStartup  b  -  false
syncFromLastFile  b  -  false
asyncLearner  b  -  false
totalReplicas  i  -  1
inSyncReplicas  i  -  1
minInSyncReplicas  i  -  1
allAckInSyncStateSet  b  -  false
enableAutoInSyncReplicas  b  -  false
disappearTimeAfterStart  i  -  -1
enableDLegerCommitLog  b  false  =
dLegerGroup  s  null  =
dLegerPeers  s  null  =
dLegerSelfId  s  null  =
preferredLeaderId  s  null  =

messageDelayLevel  s  1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h  =
flushDelayOffsetInterval  l  10000  =
enableScheduleMessageStats  b  true  =
enableScheduleAsyncDeliver  b  false  =
scheduleAsyncDeliverMaxPendingLimit  i  2000  =
scheduleAsyncDeliverMaxResendNum2Blocked  i  3  =

timerWheelEnable  b  -  true
mappedFileSizeTimerLog  i  -  104857600
timerPrecisionMs  i  -  1000
timerMaxDelaySec  i  -  259200
timerRollWindowSlot  i  -  172800
timerFlushIntervalMs  i  -  1000
timerGetMessageThreadNum  i  -  3
timerPutMessageThreadNum  i  -  3
timerEnableDisruptor  b  -  false
timerEnableRetryUntilSuccess  b  -  false
timerInterceptDelayLevel  b  -  false
timerSkipUnknownError  b  -  false
timerStopDequeue  b  -  false
timerStopEnqueue  b  -  false
timerWarmEnable  b  -  false
timerEnableCheckMetrics  b  -  true
timerCheckMetricsWhen  s  -  05
timerCongestNumEachSlot  i  -  2147483647
timerColdDataCheckIntervalMs  i  -  60000
timerMetricSmallThreshold  i  -  1000000
timerProgressLogIntervalMs  i  -  10000

enableCompaction  b  -  true
compactionMappedFileSize  i  -  104857600
compactionCqMappedFileSize  i  -  10485760
compactionScheduleInternal  i  -  900000
compactionThreadNum  i  -  6
maxOffsetMapSize  i  -  104857600

rocksdbCQDoubleWriteEnable  b  -  false
enableRocksDBLog  b  -  false
realTimePersistRocksDBConfig  b  -  true
cleanRocksDBDirtyCQIntervalMin  l  -  60
statRocksDBCQIntervalSec  l  -  10
memTableFlushIntervalMs  l  -  3600000
rocksdbCompressionType  s  -  lz4
bottomMostCompressionTypeForConsumeQueueStore  s  -  zstd
rocksdbFlushWalFrequency  i  -  1024
rocksdbWalFileRollingThreshold  l  -  1073741824
"""

# What a broker.conf says to the broker around the store. Accepted, and not used here.
_BROKER_KEYS = """
rocketmqHome brokerClusterName brokerName brokerId brokerIP1 brokerIP2 brokerPermission namesrvAddr listenPort
bindAddress fetchNamesrvAddrByAddressServer autoCreateTopicEnable autoCreateSubscriptionGroup clusterTopicEnable
brokerTopicEnable defaultTopicQueueNums sendMessageThreadPoolNums pullMessageThreadPoolNums
processReplyMessageThreadPoolNums queryMessageThreadPoolNums adminBrokerThreadPoolNums clientManageThreadPoolNums
consumerManageThreadPoolNums heartbeatThreadPoolNums endTransactionThreadPoolNums sendThreadPoolQueueCapacity
pullThreadPoolQueueCapacity waitTimeMillsInSendQueue waitTimeMillsInPullQueue registerBrokerTimeoutMills
registerNameServerPeriod forceRegister compressedRegister highSpeedMode commercialEnable rejectTransactionMessage
transferMsgByHeap maxDelayTime regionId msgTraceTopicName traceOn traceTopicEnable aclEnable enablePropertyFilter
enableCalcFilterBitMap filterSupportRetry notifyConsumerIdsChangedEnable disableConsumeIfConsumerReadSlowly
consumerFallbehindThreshold brokerFastFailureEnable startAcceptSendRequestTimeStamp enableControllerMode controllerAddr
enableSlaveActingMaster authenticationEnabled authorizationEnabled longPollingEnable shortPollingTimeMills
slaveReadEnable flushConsumerOffsetInterval flushConsumerOffsetHistoryInterval transactionTimeOut transactionCheckMax
transactionCheckInterval recoverConcurrently
"""
BROKER_KEYS = frozenset(_BROKER_KEYS.split())

_RENAMED = {"haSlaveFallbehindMax": "haMaxGapNotInSync", "isEnableBatchPush": "enableBatchPush"}


@dataclass(frozen=True, slots=True)
class StoreKey:
    """One key of MessageStoreConfig. The two defaults are written as in the table above."""

    name: str
    kind: str
    v4_9: str
    v5_3: str

    def known_to(self, dialect: Dialect) -> bool:
        """Does a broker of this version read the key?"""
        cell = self._cell(dialect)
        return cell != "-" and not cell.startswith("(")

    def default_text(self, dialect: Dialect) -> str | None:
        """How the version behaves when the key is not set; None where it has no value or no such notion."""
        cell = self._cell(dialect).removeprefix("(").removesuffix(")")
        return None if cell in ("-", "null") else cell

    @property
    def attribute(self) -> str:
        """The key in Python spelling: `checkCRCOnRecover` is `check_crc_on_recover`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.name).lower()

    def refuses(self, text: str) -> str | None:
        """What would be allowed, if this text is no value of the key's Java type."""
        match self.kind:
            case "i" | "l":
                high = INT_MAX if self.kind == "i" else LONG_MAX
                value = java_integer(text)
                return None if value is not None and -high - 1 <= value <= high else allowed_integers(-high - 1, high)
            case "b":
                return None if java_boolean(text) is not None else ALLOWED_BOOLEANS
            case "d":
                number = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[dDfF]?"
                return None if re.fullmatch(number, text) else "a decimal number"
            case _:
                return None

    def _cell(self, dialect: Dialect) -> str:
        return self.v4_9 if dialect is Dialect.V4_9 else self.v5_3


def _read_table() -> Iterator[StoreKey]:
    for row in filter(None, _TABLE.splitlines()):
        name, kind, v4_9, v5_3 = row.split("  ")
        yield StoreKey(name, kind, v4_9, v4_9 if v5_3 == "=" else v5_3)


STORE_KEYS = {key.name: key for key in _read_table()}


def _one_spelling(name: str) -> str:
    return name.replace("apped", "aped")


_BY_SPELLING = {_one_spelling(name): key for name, key in STORE_KEYS.items()}


def find_store_key(name: str) -> StoreKey | None:
    """The key by its name, by its name of another version, or with `maped` and `mapped` exchanged."""
    return STORE_KEYS.get(name) or _BY_SPELLING.get(_one_spelling(_RENAMED.get(name, name)))


def allowed_integers(low: int, high: int) -> str:
    """The words of a message about a number out of bounds."""
    return f"an integer from {low} to {high}"


def java_integer(text: str) -> int | None:
    """A decimal number as Java parses it; None for other text and for more digits than a long has."""
    number = re.fullmatch(r"([+-]?)0*([0-9]{1,19})", text)
    return int(number[1] + number[2]) if number else None


def java_boolean(text: str) -> bool | None:
    """Java takes any other text for false; a mistyped `ture` should not switch anything off."""
    return {"true": True, "false": False}.get(text.lower())


class Property(NamedTuple):
    """One setting of a properties file, and the line it starts on."""

    line: int
    key: str
    value: str


def read_properties(text: str) -> list[Property]:
    """All settings in file order, duplicates too. The syntax is that of java.util.Properties."""
    properties, problems = [], []
    for line, logical in _logical_lines(text.removeprefix("\ufeff")):
        parts = re.fullmatch(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", logical, re.DOTALL)
        assert parts is not None, "a logical line ends with no lone backslash, so every line has this shape"
        try:
            properties.append(Property(line, _unescape(parts[1]), _unescape(parts[2])))
        except ValueError:
            problems.append(f"line {line}: after \\u allowed are exactly four hexadecimal digits")
    if problems:
        raise ConfigError(problems)
    return properties


def escape_value(value: str) -> str:
    """A value as `read_properties` reads it back. ASCII only, since Java reads a stream of properties as Latin-1."""
    return "".join(_escape(character) for character in value)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments and blank ones, continuations joined, each with the number it starts on."""
    start, joined, continues = 0, "", False
    for number, natural in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        line = natural.lstrip(" \t\f")
        if not continues:
            # Only here: behind a continued line, `#` is an ordinary character.
            if line.startswith(("#", "!")):
                continue
            start, joined = number, ""
        backslashes = len(line) - len(line.rstrip("\\"))
        continues = backslashes % 2 == 1
        joined += line[:-1] if continues else line
        if joined and not continues:
            yield start, joined
    if joined and continues:
        yield start, joined


_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPES = {character: f"\\{letter}" for letter, character in _ESCAPED.items()} | {"\\": "\\\\"}


def _unescape(text: str) -> str:
    """Resolve backslashes; ValueError where four hexadecimal digits should be and are not."""
    if "\\" not in text:
        return text
    plain = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", _resolve, text, flags=re.DOTALL)
    # Beyond the first 65,536 characters an escape is a pair of UTF-16 units: join them.
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _resolve(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if code[0] == "u" else _ESCAPED.get(code, code)


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if " " <= character <= "~":
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
