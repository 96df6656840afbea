/* Search from disk: browsers start no worker for a page that was opened as a file. This runs the worker's script in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = this.onerror = null
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => setTimeout(() => this.receive(data))
      inside.importScripts = () => {}
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.inside = inside
        this.waiting.splice(0).forEach((data) => this.postMessage(data))
      }
      script.onerror = (error) => this.onerror && this.onerror(error)
      inside.document.body.appendChild(script)
    }
    receive(data) {
      const event = new MessageEvent("message", { data })
      if (this.onmessage) this.onmessage(event)
      this.dispatchEvent(event)
    }
    postMessage(data) {
      if (!this.inside) return this.waiting.push(data)
      const event = new MessageEvent("message", { data })
      if (this.inside.onmessage) this.inside.onmessage(event)
      this.inside.dispatchEvent(event)
    }
    terminate() {
      this.frame.remove()
    }
  }
}
