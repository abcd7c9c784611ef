'use strict';

exports.total = (files) => {
  const bytes = files.reduce((sum, { size }) => sum + size, 0);
  return bytes < 1000 ? `${bytes} B` : `${(bytes / 1000).toFixed(1)} KiB`;
};
